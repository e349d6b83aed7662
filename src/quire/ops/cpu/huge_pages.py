"""Memory in huge pages of 2 MiB, for weights that every step reads completely.

Knows how Linux allocates huge pages. Does not know the contents. Most distributions use huge pages only on request
("madvise"). A step of one token read its weights at 16 to 22 GB/s from scattered pages of 4 KiB, and at 28 to 32 from
huge pages (2 cores of a virtual machine, where a TLB miss costs two page walks).

Tensors share a region, one after the other, because few have a size that is a multiple of a page. The system gets a
region back when its last tensor is freed. Other systems than Linux use torch's own memory.
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
REGION = 64 << 20  # bytes of address space; Linux provides memory page by page at first write
LINE = 4096  # alignment of tensors in bytes


class Regions:
    """Allocates tensors from regions, one after the other; thread-safe."""

    def __init__(self) -> None:
        self._last: Callable[[], mmap.mmap | None] = lambda: None
        self._next = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
        """A tensor in untouched memory. Raises OSError: the system has no address space left."""
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
        # The tensor keeps the region alive; this object has only a weak reference.
        return torch.frombuffer(region, dtype=dtype, count=count, offset=start).view(shape)

    def _region(self, size: int) -> mmap.mmap:
        """A new region of at least this many bytes, with its first huge page at `_next`."""
        size = max(REGION, -(-size // PAGE) * PAGE)
        region = mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._next = -torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr() % PAGE
        with suppress(OSError):  # without huge pages in the kernel, pages stay small
            region.madvise(mmap.MADV_HUGEPAGE)
        self._last = weakref.ref(region)
        return region


empty = Regions().empty
