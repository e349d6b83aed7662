"""Pages of the KV cache, asked of the operating system a little before they are written to.

Knows storages and block ids. A page that is touched for the first time is zeroed then, which takes one to four seconds a
gigabyte on some machines: as long as the arithmetic of a prompt. At the start there is no time for it, and in a step
neither; so a thread of low priority does it, as many blocks ahead of the highest one in use as a step may take. Blocks
are taken in the order of their ids until each was used once; after that there is nothing left to do here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.batch import Batch

POPULATE_WRITE = 23  # of madvise, since Linux 5.14: as if each page had been written to
SLICE = 4 << 20  # bytes at a time
MOST = 256 << 20  # bytes ahead
NICENESS = 10


class PagesAhead(Hook):
    """A hook that only looks at which blocks a plan hands out.

    Args:
        storages: the cache, as `allocate_cache` returned it.
        num_blocks: blocks of each, the null block counted.
        step: blocks that one step may take.
    """

    name = "pages"

    def __init__(self, storages: Sequence[tuple[Tensor, ...]], num_blocks: int, step: int):
        parts = [part for storage in storages for part in storage]
        self.parts = [(part.data_ptr(), part.nbytes // num_blocks) for part in parts]
        self.each = sum(size for _, size in self.parts)
        on_host = all(part.device.type == "cpu" for part in parts) and sys.platform == "linux"
        self.num_blocks = num_blocks if on_host and self.each else 0
        self.ahead = min(step, MOST // self.each) if self.num_blocks else 0
        self.asked = 0  # blocks below this have their pages, or will
        self._jobs: SimpleQueue[tuple[int, int]] = SimpleQueue()
        if self.num_blocks:
            threading.Thread(target=self._work, name="pages", daemon=True).start()
            self._ask(self.ahead)

    def before(self, plan: StepPlan, batch: Batch) -> None:
        if self.asked >= self.num_blocks:
            return
        columns = [column for new in plan.entered for column in new.blocks]
        columns += [column for item in plan.work for column in item.new_blocks]
        used = max((max(column) for column in columns if column), default=0)
        if used + self.ahead // 2 >= self.asked:
            self._ask(used + self.ahead)

    def _ask(self, until: int) -> None:
        start, self.asked = self.asked, min(until + 1, self.num_blocks)
        self._jobs.put((start, self.asked))

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        while True:
            block, until = self._jobs.get()
            while block < until:
                end = min(until, block + max(1, SLICE // self.each))
                for address, size in self.parts:
                    first = (address + block * size) // mmap.PAGESIZE * mmap.PAGESIZE
                    last = -(-(address + end * size) // mmap.PAGESIZE) * mmap.PAGESIZE
                    if madvise(first, last - first, POPULATE_WRITE):
                        return  # an older kernel, or no memory left: pages come when they are touched
                block = end
