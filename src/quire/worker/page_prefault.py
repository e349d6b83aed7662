"""Prefaulting of KV cache pages: a thread makes the operating system allocate pages before a step writes to them.

Knows storages and block ids. The system zeroes a page when it is first touched, which takes one to four seconds per
gigabyte on some machines: as long as the computation of a prompt. At startup and in a step that is too slow, so a
low-priority thread does it. It stays ahead of the highest block in use by as many blocks as one step may take. The
block pool hands out blocks in the order of their ids until each was used once; after that this hook has nothing to do.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.platforms import memory
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

SLICE = 4 << 20  # bytes to prefault at a time
MAX_AHEAD = 256 << 20  # bytes to stay ahead, at most
NICENESS = 10

Job = tuple[list[Tensor], int, int, int]
"""The parts of a cache, its number of blocks, and the first and the end of those to prefault."""


class KVPagePrefaulter(Hook):
    """Watches which blocks plans hand out. Without a cache in host memory it does nothing.

    Args:
        num_blocks: blocks of each storage, the null block included.
        step: blocks that one step may take.
    """

    name = "pages"
    order = 90

    def __init__(self, num_blocks: int, step: int):
        self.num_blocks, self.step = num_blocks, step
        self.parts: list[Tensor] = []
        self.ahead = 0
        self.prefaulted = 0  # blocks below this one are prefaulted, or queued for it
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._runs = False

    def begin(self, storages: Sequence[tuple[Tensor, ...]]) -> None:
        """Start over with this cache, as `allocate_cache` returned it; none of its pages is allocated yet."""
        parts = [part for storage in storages for part in storage]
        on_host = all(part.device.type == "cpu" for part in parts) and sys.platform == "linux"
        self.parts, self.prefaulted = parts if on_host else [], 0
        if not self.parts:
            return
        if not self._runs:
            self._runs = True
            threading.Thread(target=work, args=(self._jobs,), name="pages", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        self.ahead = min(self.step, MAX_AHEAD // bytes_per_block(self.parts, self.num_blocks))
        self._queue(self.ahead)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True  # it reads the plan only

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if not self.parts or self.prefaulted >= self.num_blocks:
            return
        columns = [column for new in plan.entered for column in new.blocks]
        columns += [column for item in plan.work for column in item.new_blocks]
        highest = max((max(column) for column in columns if column), default=0)
        if highest + self.ahead // 2 >= self.prefaulted:
            self._queue(highest + self.ahead)

    def _queue(self, until: int) -> None:
        start, self.prefaulted = self.prefaulted, min(until + 1, self.num_blocks)
        self._jobs.put((self.parts, self.num_blocks, start, self.prefaulted))


def bytes_per_block(parts: Sequence[Tensor], num_blocks: int) -> int:
    return sum(part.nbytes for part in parts) // num_blocks


def work(jobs: SimpleQueue[Job | None]) -> None:
    """The thread. It knows the queue alone, so that an engine that is gone keeps neither its cache nor this thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    while (job := jobs.get()) is not None:
        with suppress(OSError):  # pages are then allocated when they are touched
            prefault(*job)
        del job  # it keeps the memory alive


def prefault(parts: Sequence[Tensor], num_blocks: int, start: int, until: int) -> None:
    """Raises OSError: an older kernel, or no memory is left."""
    blocks_at_once = max(1, SLICE // bytes_per_block(parts, num_blocks))
    for block in range(start, until, blocks_at_once):
        for part in parts:
            size, start_of = part.nbytes // num_blocks, part.data_ptr()
            end = min(until, block + blocks_at_once)
            memory.prefault(start_of + block * size, start_of + end * size)
