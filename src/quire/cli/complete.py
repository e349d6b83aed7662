"""`quire complete`: continue a text, in this process or on a server.

Knows the terminal. `completion_client.py` gets the completions.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.answer_printer import print_answer, print_notice
from quire.cli.chat import input_lines, run_in_terminal
from quire.cli.completion_client import ClientOptions, CompletionClient
from quire.errors import QuireError


def main(argv: Sequence[str]) -> int:
    """Complete texts until the end of input; returns the exit status."""
    return run_in_terminal("complete", argv, texts)


def texts(options: ClientOptions, client: CompletionClient) -> int:
    """Read texts and show their completions in turn."""
    if options.quick is not None:
        print_answer(client.complete(options.quick), options.stats)
        return 0
    print_notice(f"{client.name} completes your texts. Ctrl-C stops a completion, Ctrl-D exits.")
    for line in input_lines():
        try:
            print_answer(client.complete(line), options.stats)
        except QuireError as why:
            print_notice(f"error: {why}")
    return 0
