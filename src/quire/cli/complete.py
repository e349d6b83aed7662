"""`quire complete`: continue a text, in this process or on a server.

Knows the terminal. `completion_client.py` gets the completions.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.chat import at_the_terminal, lines, say, shown
from quire.cli.completion_client import ClientOptions, CompletionClient
from quire.errors import QuireError


def main(argv: Sequence[str]) -> int:
    """Complete texts until the end of input; returns the exit status."""
    return at_the_terminal("complete", argv, texts)


def texts(wish: ClientOptions, there: CompletionClient) -> int:
    """Read texts and show their completions in turn."""
    if wish.quick is not None:
        shown(there.complete(wish.quick), wish.stats)
        return 0
    say(f"{there.name} completes your texts. Ctrl-C stops a completion, Ctrl-D exits.")
    for line in lines():
        try:
            shown(there.complete(line), wish.stats)
        except QuireError as why:
            say(f"error: {why}")
    return 0
