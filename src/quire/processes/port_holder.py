"""Which process listens on a TCP port of this machine, for error messages. Knows Linux's /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"


def port_holder(port: int, proc: Path = Path("/proc")) -> str:
    """ " (process 123, python)"; empty if the process is another user's, or there is none."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    for folder in proc.glob("[0-9]*") if inodes else ():
        with suppress(OSError):  # it has ended, or is another user's
            if inodes & {_target(fd) for fd in (folder / "fd").iterdir()}:
                name = (folder / "comm").read_text().strip()
                return f" (process {folder.name}, {name})"
    return ""


def _target(fd: Path) -> str:
    """The target of the link; "" if the descriptor was closed since it was listed, as the list's own descriptor was."""
    with suppress(FileNotFoundError):
        return os.readlink(fd)
    return ""


def _inodes(port: int, proc: Path) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
