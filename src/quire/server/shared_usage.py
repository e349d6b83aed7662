"""Usage of API keys: numbers in memory, or in a file that several HTTP processes share.

Knows numbers and locks. Does not know their meaning, except which of them count one process's running completions.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from quire.logging import get_logger

log = get_logger(__name__)

PLAIN = 4  # shared numbers; one for each process follows


class UsageAccount:
    """PLAIN shared numbers, and one for each process."""

    def __init__(self, front: int = 0, fronts: int = 1):
        self.numbers: list[float] | memoryview[float] = [0.0] * (PLAIN + fronts)
        self.own = PLAIN + front
        self._lock = threading.RLock()  # threads that read long requests use keys too

    @property
    def under_way(self) -> int:
        """Running completions of all processes."""
        return int(sum(self.numbers[index] for index in range(PLAIN, len(self.numbers))))

    def begin(self, count: int = 1) -> None:
        with self._lock:
            self.numbers[self.own] += count

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks all numbers. Must not be held across an await."""
        with self._lock:
            yield


class SharedUsageAccount(UsageAccount):
    """The same in a file; its times are of the machine's monotonic clock."""

    def __init__(self, path: Path, front: int, fronts: int):
        super().__init__(front, fronts)
        size = 8 * (PLAIN + fronts)
        self._fd = -1
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        allocate(self._fd, size)
        self.numbers = memoryview(mmap.mmap(self._fd, size)).cast("d")
        self._depth = 0

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            if not self._depth:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)


def allocate(fd: int, size: int) -> None:
    """Allocate a file's blocks: writing to a mapped page when the disk is full would kill the process. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


class UsageLedger:
    """Accounts by key name, for one of several processes."""

    def __init__(self, folder: Path, front: int, fronts: int):
        self.folder, self.front, self.fronts = folder, front, fronts

    def account(self, name: str) -> UsageAccount:
        path = self.folder / sha256(name.encode()).hexdigest()
        try:
            return SharedUsageAccount(path, self.front, self.fronts)
        except OSError as why:
            log.warning("the limits of a key apply to each HTTP process separately: %s", why)
            return UsageAccount(self.front, self.fronts)


def forget(folder: Path, front: int, fronts: int) -> None:
    """Set the running completions of a dead process to 0."""
    for path in folder.iterdir():
        SharedUsageAccount(path, front, fronts).numbers[PLAIN + front] = 0.0
