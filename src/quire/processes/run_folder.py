"""The folder of a running engine: its sockets, its flight recording, its configuration.

A killed server cannot remove its folder, which contains tokens of prompts. Each server locks its own folder, and the
system releases the lock when the process ends. The next server removes folders with a lock file that no process has
locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

from quire import env
from quire.errors import StartupError
from quire.logging import get_logger

log = get_logger(__name__)

PREFIX = "quire-"
LOCK = "lock"
KERNELS = "quire-kernels-"
"""Folders of kernels that are compiled for one process. They have no lock, and are used for minutes."""
KERNELS_S = 3600.0


def own_folder() -> Path:
    """Create a folder that other users cannot read, in the first writable directory.

    Raises:
        StartupError: no directory is writable.
    """
    tried: list[str] = []
    # None: Python's default, which uses TMPDIR.
    for place in (None, env.outer("XDG_RUNTIME_DIR"), "/dev/shm"):
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as why:
            tried.append(str(why))
    raise StartupError(
        f"the engine's sockets need a writable directory ({'; '.join(tried)}): set TMPDIR to one"
    )


def hold(folder: Path) -> IO[bytes] | None:
    """Lock a folder until the lock is closed or this process ends.

    None if the file system is full or has no locks: then no other server removes the folder.
    """
    unlocked = folder / f"{LOCK}.new"
    try:
        lock = unlocked.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.replace(folder / LOCK)  # other servers see the lock file only now
    except OSError:
        return None
    return lock


def shared_folder(owner: object) -> Path:
    """As `own_folder`, locked, for the sockets of several processes; it is removed with `owner`, or when this process ends.

    Raises:
        StartupError: no directory is writable.
    """
    folder = own_folder()
    weakref.finalize(owner, _remove, folder, hold(folder))
    return folder


def _remove(folder: Path, lock: IO[bytes] | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        lock.close()


def remove_stale(place: Path) -> None:
    """Remove the folders of servers that have ended; folders of other users and of running servers stay."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            if not _is_ours(folder):
                continue
            if folder.name.startswith(KERNELS):
                if time.time() - folder.lstat().st_mtime > KERNELS_S:
                    shutil.rmtree(folder)
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            log.info("removed %s, left by a killed server", folder)
        except OSError:  # it is locked, has no lock file, or was removed in the meantime
            continue


def _is_ours(folder: Path) -> bool:
    """Whether it is a directory, not a link, that belongs to this user and that no other user can write to."""
    found = folder.lstat()
    private = not found.st_mode & 0o077
    return stat.S_ISDIR(found.st_mode) and private and found.st_uid == os.geteuid()
