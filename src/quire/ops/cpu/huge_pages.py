"""Memory in pages of 2 MiB, for weights that every step reads from end to end.

Knows how Linux hands such pages out. Does not know what is kept in them. Linux gives small pages unless it is asked
("madvise", as most distributions have it): one row's weights came at 16 to 22 GB/s from pages of 4 KiB that lay scattered,
and at 28 to 32 from large ones (2 cores of a virtual machine, where a page that is not in the TLB costs two walks).

Weights that are smaller than a page, or no multiple of one, lie side by side in a region. A region goes back to the
system with the last tensor in it. Elsewhere than on Linux this is torch's own memory.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
REGION = 64 << 20  # bytes of address space; memory is taken page by page as it is written to
LINE = 4096  # where a tensor may begin


class Regions:
    """Hands out parts of regions, one after the other, to any thread."""

    def __init__(self) -> None:
        self._last: Callable[[], mmap.mmap | None] = lambda: None
        self._next = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A tensor whose memory nobody has touched. Raises OSError: the system has no address space left."""
        if sys.platform != "linux":
            return torch.empty(shape, dtype=dtype)
        count = shape if isinstance(shape, int) else math.prod(shape)
        size = count * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            region = self._last()
            if region is None or self._next + size > len(region):
                region = self._region(size)
            start, self._next = self._next, -(-(self._next + size) // LINE) * LINE
        # The tensor holds the region; this object does not.
        return torch.frombuffer(region, dtype=dtype, count=count, offset=start).view(shape)

    def _region(self, size: int) -> mmap.mmap:
        """A new one of at least so many bytes, its first page at `_next`."""
        size = max(REGION, -(-size // PAGE) * PAGE)
        region = mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._next = -torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr() % PAGE
        with suppress(OSError):  # a kernel without them: pages are small then
            region.madvise(mmap.MADV_HUGEPAGE)
        self._last = weakref.ref(region)
        return region


empty = Regions().empty
