"""Staging: host memory that an engine shares with its workers, divided into slots of one record each.

Threads of the engine fill slots from a store, and workers copy them into blocks; or the other way round. Each rank says in
the first page up to which step it has run its copies, so no slot is reused, or written to a store, before all ranks are done.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque

from quire.kvstore.record import PAGE, Buffer

MOST_RANKS = PAGE // 8


class Staging:
    """The memory, and which of its slots are free. `path` leads other processes of the same user to it.

    kept: the numbers of further slots, for blocks that stay in them (`host_pool.py`). Untouched, they take no memory.
    """

    def __init__(self, slot_bytes: int, num_slots: int, ranks: int, num_kept: int = 0):
        self.slot_bytes, self.num_slots, self.ranks = slot_bytes, num_slots, ranks
        self.kept = range(num_slots, num_slots + num_kept)
        size = PAGE + slot_bytes * (num_slots + num_kept)
        self._fd = _memory_file()
        os.ftruncate(self._fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        if not os.path.exists(self.path):
            self.path = f"/dev/fd/{self._fd}"  # only this process
        self._map = mmap.mmap(self._fd, size)
        self._view = memoryview(self._map)
        self._acks = self._view[:PAGE].cast("q")
        self._free = deque(range(num_slots))
        self._changed = threading.Condition()
        self._closed = False

    def slot(self, number: int) -> memoryview:
        start = PAGE + number * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    @property
    def acknowledged(self) -> int:
        """All ranks have run their copies of the steps up to this one."""
        return min(self._acks[: self.ranks])

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None."""
        with self._changed:
            return self._free.popleft() if self._free else None

    def wait(self) -> int | None:
        """A free slot; waits until there is one. None: the engine ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            return None if self._closed else self._free.popleft()

    def give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Wake the threads that wait. The memory is freed with this object."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __del__(self) -> None:
        os.close(self._fd)


class StagingView:
    """A rank's view of the staging memory: `memory` begins at the first slot."""

    def __init__(self, path: str, rank: int):
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._acks = memoryview(self._map)[:PAGE].cast("q")
        self.memory: Buffer = memoryview(self._map)[PAGE:]
        self.rank = rank

    def acknowledge(self, step: int) -> None:
        """This rank has run all copies of the steps up to this one."""
        self._acks[self.rank] = step


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quire-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
