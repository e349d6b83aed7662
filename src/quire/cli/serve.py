"""`quire serve MODEL [flags]`: parses the flags and starts the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.config.flags import parse
from quire.errors import QuireError
from quire.logging import configure


def main(argv: Sequence[str]) -> int:
    """Serve until stopped.

    Returns:
        0 stopped, 1 could not start or died, 2 a mistake in flags or variables.
    """
    try:
        configure("server")
        config = parse(argv)
        if config.observe.log_level:
            configure("server", config.observe.log_level)
    except ValueError as why:
        return _failed(why, 2)
    # It takes half a second to import, which --help need not wait for.
    from quire.server.process.launch import serve

    try:
        return int(serve(config))
    except QuireError as why:
        return _failed(why, 1)


def _failed(why: Exception, status: int) -> int:
    print(f"quire serve: error: {why}", file=sys.stderr)
    return status
