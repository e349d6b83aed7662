"""`quire chat`: talk with a model, in this process or on a server.

Knows the terminal. `completion_client.py` gets the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from quire.cli.completion_client import ClientOptions, CompletionClient, TimingLine, read, talker
from quire.errors import QuireError
from quire.logging import configure

PROMPT = "> "


def main(argv: Sequence[str]) -> int:
    """Chat until the end of input; returns the exit status."""
    return at_the_terminal("chat", argv, conversation)


def at_the_terminal(
    command: str, argv: Sequence[str], talk: Callable[[ClientOptions, CompletionClient], int]
) -> int:
    """Connect to the model that the flags name and run `talk`. An error is one line on stderr and exit status 1."""
    wish = read(command, argv)
    configure(command, wish.config.observe.log_level)
    try:
        with closing(talker(wish)) as there:
            return talk(wish, there)
    except QuireError as why:
        say(f"quire {command}: error: {why}")
        return 1


def conversation(wish: ClientOptions, there: CompletionClient) -> int:
    """Send messages and show answers in turn."""
    start: list[dict[str, str]] = []
    if wish.system_prompt:
        start.append({"role": "system", "content": wish.system_prompt})
    if wish.quick is not None:
        shown(there.chat([*start, {"role": "user", "content": wish.quick}]), wish.stats)
        return 0
    say(
        f"Chatting with {there.name}. /reset clears the conversation; Ctrl-C stops an answer, Ctrl-D exits."
    )
    messages = list(start)
    for line in lines():
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = shown(there.chat(messages), wish.stats)
        except QuireError as why:  # this message failed; the conversation continues without it
            say(f"error: {why}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def lines() -> Iterator[str]:
    """The lines that the user types, until the end of input; skips empty lines."""
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
    """Write an answer as it arrives and return all of it. Ctrl-C stops it."""
    clock, parts = TimingLine(pieces), []
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
    """Print to the user, on stderr, so that stdout has only answers."""
    print(words, file=sys.stderr, flush=True)
