"""`quire chat`: talk with a model, in this process or on a server.

Knows the terminal. Where answers come from is `talk.py`'s matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from quire.cli.talk import Clock, Talker, Wish, read, talker
from quire.errors import QuireError
from quire.logging import configure

PROMPT = "> "


def main(argv: Sequence[str]) -> int:
    """Talk until the end of input; the exit status."""
    wish = read("chat", argv)
    configure("chat", wish.config.observe.log_level)
    try:
        there = talker(wish)
    except QuireError as why:
        print(f"quire chat: error: {why}", file=sys.stderr)
        return 1
    try:
        return conversation(wish, there)
    except QuireError as why:
        print(f"\nquire chat: error: {why}", file=sys.stderr)
        return 1
    finally:
        there.close()


def conversation(wish: Wish, there: Talker) -> int:
    """One message and its answer after the other."""
    start: list[dict[str, str]] = []
    if wish.system_prompt:
        start.append({"role": "system", "content": wish.system_prompt})
    if wish.quick is not None:
        shown(there.chat([*start, {"role": "user", "content": wish.quick}]), wish.stats)
        return 0
    say(
        f"Talking with {there.name}. /reset forgets the conversation; Ctrl-C stops an answer, Ctrl-D ends."
    )
    messages = list(start)
    for line in lines():
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = shown(there.chat(messages), wish.stats)
        except QuireError as why:  # this message's fault; the conversation goes on without it
            say(f"error: {why}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def lines() -> Iterator[str]:
    """What is typed, until the end; empty lines mean nothing."""
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("")
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def shown(pieces: Iterator[str], stats: bool) -> str:
    """Write an answer as it comes; all of it. Ctrl-C ends it there."""
    clock, parts = Clock(pieces), []
    try:
        for piece in clock:
            parts.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" ...")
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    if stats:
        say(str(clock))
    return "".join(parts)


def say(words: str) -> None:
    """To the person, not into the answer."""
    print(words, file=sys.stderr, flush=True)
