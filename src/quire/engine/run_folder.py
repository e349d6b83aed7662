"""The folder of a running engine: its sockets, its recording, its configuration.

A server that was killed cannot remove it, and the tokens of prompts are in it. Each server holds a lock on its own
folder, which the system lets go when the process ends; the next server removes folders that have a lock nobody
holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from quire import env
from quire.errors import StartupError
from quire.logging import get_logger

log = get_logger(__name__)

PREFIX = "quire-"
LOCK = "lock"


def own_folder() -> Path:
    """A new folder that nobody else can read, in the first directory that can be written.

    Raises:
        StartupError: there is none.
    """
    tried: list[str] = []
    for place in (
        None,
        env.outer("XDG_RUNTIME_DIR"),
        "/dev/shm",
    ):  # None: as Python chooses, by TMPDIR
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as why:
            tried.append(str(why))
    raise StartupError(
        f"the engine's sockets need a directory that can be written ({'; '.join(tried)}): set TMPDIR to one"
    )


def hold(folder: Path) -> IO[bytes] | None:
    """The lock of a folder, until it is closed or this process ends.

    None where the file system has no room or no locks: no other server removes the folder then.
    """
    new = folder / f"{LOCK}.new"
    try:
        lock = new.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.replace(folder / LOCK)  # only now do others see it
    except OSError:
        return None
    return lock


def remove_stale(place: Path) -> None:
    """Remove the folders of servers that have ended; those of others and of running servers stay."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            if not _is_ours(folder):
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            log.info("removed %s, which a server that was killed had left", folder)
        except OSError:  # it is held, has no lock, or went meanwhile
            continue


def _is_ours(folder: Path) -> bool:
    """A directory of this user that no other user can have filled, and no link to one."""
    found = folder.lstat()
    private = not found.st_mode & 0o077
    return stat.S_ISDIR(found.st_mode) and private and found.st_uid == os.geteuid()
