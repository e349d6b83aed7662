"""One of several servers on one machine: `python -m quire.server.process.port_server PARENT`.

Reads its configuration from stdin, and serves as `quire serve` does. It ends with its parent, `port_supervisor.py`.
"""

from __future__ import annotations

import os
import sys

from quire.config.serialize import resolved_from_bytes
from quire.errors import QuireError
from quire.logging import configure
from quire.processes.child import end_with_parent
from quire.server.process.launch import serve
from quire.terminal import show


def main(parent: int) -> int:
    os.setsid()  # a terminal's Ctrl-C reaches the parent, which stops this process
    end_with_parent(parent)
    config = resolved_from_bytes(sys.stdin.buffer.read()).config
    configure(f"server {config.parallel.data_parallel_rank}", config.observe.log_level)
    try:
        return serve(config)
    except QuireError as why:
        show(f"quire serve: error: {why}", sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
