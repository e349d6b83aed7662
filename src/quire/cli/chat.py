"""`quire chat`: talk with a model, in this process or on a server.

Knows the terminal. `completion_client.py` gets the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from quire.cli.completion_client import ClientOptions, CompletionClient, TimingLine, connect, read
from quire.errors import QuireError
from quire.logging import configure

PROMPT = "> "


def main(argv: Sequence[str]) -> int:
    """Chat until the end of input; returns the exit status."""
    return run_in_terminal("chat", argv, conversation)


def run_in_terminal(
    command: str, argv: Sequence[str], session: Callable[[ClientOptions, CompletionClient], int]
) -> int:
    """Connect to the model that the flags name and run `session`. An error is one line on stderr and exit status 1."""
    options = read(command, argv)
    configure(command, options.config.observe.log_level)
    try:
        with closing(connect(options)) as client:
            return session(options, client)
    except QuireError as why:
        print_notice(f"quire {command}: error: {why}")
        return 1


def conversation(options: ClientOptions, client: CompletionClient) -> int:
    """Send messages and show answers in turn."""
    start: list[dict[str, str]] = []
    if options.system_prompt:
        start.append({"role": "system", "content": options.system_prompt})
    if options.quick is not None:
        print_answer(
            client.chat([*start, {"role": "user", "content": options.quick}]), options.stats
        )
        return 0
    print_notice(
        f"Chatting with {client.name}. /reset clears the conversation; Ctrl-C stops an answer, Ctrl-D exits."
    )
    messages = list(start)
    for line in input_lines():
        if line == "/reset":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = print_answer(client.chat(messages), options.stats)
        except QuireError as why:  # this message failed; the conversation continues without it
            print_notice(f"error: {why}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def input_lines() -> Iterator[str]:
    """The lines that the user types, until the end of input; skips empty lines."""
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print_notice("")
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def print_answer(pieces: Iterator[str], stats: bool) -> str:
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
        print_notice(str(clock))
    return "".join(parts)


def print_notice(words: str) -> None:
    """Print to the user, on stderr, so that stdout has only answers."""
    print(words, file=sys.stderr, flush=True)
