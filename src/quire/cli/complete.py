"""`quire complete`: go on with a text, in this process or on a server.

Knows the terminal. Where the words come from is `talk.py`'s matter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.cli.chat import lines, say, shown
from quire.cli.talk import Talker, Wish, read, talker
from quire.errors import QuireError
from quire.logging import configure


def main(argv: Sequence[str]) -> int:
    """Complete until the end of input; the exit status."""
    wish = read("complete", argv)
    configure("complete", wish.config.observe.log_level)
    try:
        there = talker(wish)
    except QuireError as why:
        print(f"quire complete: error: {why}", file=sys.stderr)
        return 1
    try:
        return texts(wish, there)
    except QuireError as why:
        print(f"\nquire complete: error: {why}", file=sys.stderr)
        return 1
    finally:
        there.close()


def texts(wish: Wish, there: Talker) -> int:
    """One text and how it goes on after the other."""
    if wish.quick is not None:
        shown(there.complete(wish.quick), wish.stats)
        return 0
    say(f"{there.name} goes on with your texts. Ctrl-C stops one, Ctrl-D ends.")
    for line in lines():
        try:
            shown(there.complete(line), wish.stats)
        except QuireError as why:
            say(f"error: {why}")
    return 0
