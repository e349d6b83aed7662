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

from torch import Tensor

from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

POPULATE_WRITE = 23  # of madvise, since Linux 5.14: as if each page had been written to
SLICE = 4 << 20  # bytes at a time
MOST = 256 << 20  # bytes ahead
NICENESS = 10


class KVPagePrefaulter(Hook):
    """A hook that only looks at which blocks a plan hands out. Of no cache, or one on a device, it does nothing.

    Args:
        num_blocks: blocks of each storage, the null block counted.
        step: blocks that one step may take.
    """

    name = "pages"

    def __init__(self, num_blocks: int, step: int):
        self.num_blocks, self.step = num_blocks, step
        self.parts: list[Tensor] = []
        self.ahead = self.asked = 0  # blocks below `asked` have their pages, or will
        self._jobs: SimpleQueue[tuple[list[Tensor], int, int]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, storages: Sequence[tuple[Tensor, ...]]) -> None:
        """From now on the cache is this, as `allocate_cache` returned it, and none of its pages is there yet."""
        parts = [part for storage in storages for part in storage]
        on_host = all(part.device.type == "cpu" for part in parts) and sys.platform == "linux"
        self.parts, self.asked = parts if on_host else [], 0
        if not self.parts:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
            self._thread.start()
        self.ahead = min(self.step, MOST // self._each(self.parts))
        self._ask(self.ahead)

    def before(self, plan: StepPlan) -> None:
        if not self.parts or self.asked >= self.num_blocks:
            return
        columns = [column for new in plan.entered for column in new.blocks]
        columns += [column for item in plan.work for column in item.new_blocks]
        used = max((max(column) for column in columns if column), default=0)
        if used + self.ahead // 2 >= self.asked:
            self._ask(used + self.ahead)

    def _ask(self, until: int) -> None:
        start, self.asked = self.asked, min(until + 1, self.num_blocks)
        self._jobs.put((self.parts, start, self.asked))

    def _each(self, parts: Sequence[Tensor]) -> int:
        """Bytes of a block."""
        return sum(part.nbytes for part in parts) // self.num_blocks

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        while True:
            parts, start, until = (
                self._jobs.get()
            )  # held as long as it takes: their memory stays theirs
            few = max(1, SLICE // self._each(parts))
            for block in range(start, until, few):
                for part in parts:
                    size = part.nbytes // self.num_blocks
                    first = part.data_ptr() + block * size
                    last = part.data_ptr() + min(until, block + few) * size
                    first, last = (
                        first // mmap.PAGESIZE * mmap.PAGESIZE,
                        -(-last // mmap.PAGESIZE) * mmap.PAGESIZE,
                    )
                    if madvise(first, last - first, POPULATE_WRITE):
                        return  # an older kernel, or no memory left: pages come when they are touched
            del parts
