"""How Linux provides memory: lazily zeroed tensors, huge pages, prefaulting, and giving pages back.

Knows mmap, madvise and glibc's malloc. Does not know what the memory holds. On other systems it uses torch's own memory
and gives nothing back.

    lazy_zeros            torch.zeros writes to every page, which takes a second per gigabyte on some machines; the pages of
                          a new mapping are already zero
    huge_pages            a step of one token read its weights at 16 to 22 GB/s from scattered pages of 4 KiB, and at 28 to
                          32 from pages of 2 MiB (2 cores of a virtual machine, where a TLB miss costs two page walks)
    separate_blocks       keeps freed blocks of a load out of glibc's heap
    release_file_pages    drops resident pages of mapped checkpoint files
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes
POPULATE_WRITE = 23  # madvise, since Linux 5.14: allocate pages as if written to


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def madvise(start: int, end: int, advice: int) -> None:
    """Advise the kernel about the pages [start, end). Raises OSError."""
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def prefault(start: int, end: int) -> None:
    """Allocate the pages that hold [start, end). Raises OSError: an older kernel, or no memory is left."""
    page = mmap.PAGESIZE
    madvise(start // page * page, -(-end // page) * page, POPULATE_WRITE)


def read_ahead(tensor: Tensor) -> None:
    """Let the system read a tensor of a mapped file, while this process goes on."""
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    with suppress(OSError, AttributeError):  # a system without this
        size = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        madvise(start // page * page, start + (size + 1) * tensor.itemsize, mmap.MADV_WILLNEED)


# ------------------------------------------------------------------------------------ lazy zeros


def lazy_zeros(
    shape: tuple[int, ...] | int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A zeroed tensor. On the CPU the system allocates its pages when they are first touched."""
    where = torch.device(device)
    if where.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=where)
    size = int(np.prod(shape)) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(size + CACHE_LINE, np.uint8))
    start = -pages.data_ptr() % CACHE_LINE  # the allocator's header is at the start of the mapping
    return pages[start : start + size].view(dtype).view(shape)


def give_back(tensor: Tensor) -> int:
    """Return the pages of a tensor that `lazy_zeros` made to the operating system. Returns the number of bytes.

    The tensor keeps its address. Its contents become zero; it uses memory again when it is touched.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return 0
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first = start + -start % page  # keep pages that are shared with other data
    end = (start + tensor.numel() * tensor.itemsize) // page * page
    if end <= first:
        return 0
    madvise(first, end, mmap.MADV_DONTNEED)
    return end - first


# ------------------------------------------------------------------------------------ huge pages

HUGE_PAGE = 2 << 20
REGION_BYTES = 64 << 20  # bytes of address space; Linux provides memory page by page at first write
ALIGNMENT = 4096  # alignment of tensors in bytes


class HugePageRegions:
    """Allocates tensors from regions of huge pages, which most distributions use only on request; thread-safe.

    Tensors share a region, one after the other, because few have a size that is a multiple of a page. The system gets
    a region back when its last tensor is freed.
    """

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
            start, self._next = self._next, -(-(self._next + size) // ALIGNMENT) * ALIGNMENT
        # The tensor keeps the region alive; this object has only a weak reference.
        return torch.frombuffer(region, dtype=dtype, count=count, offset=start).view(shape)

    def _region(self, size: int) -> mmap.mmap:
        """A new region of at least this many bytes, with its first huge page at `_next`."""
        size = max(REGION_BYTES, -(-size // HUGE_PAGE) * HUGE_PAGE)
        region = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._next = -torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
        with suppress(OSError):  # without huge pages in the kernel, pages stay small
            region.madvise(mmap.MADV_HUGEPAGE)
        self._last = weakref.ref(region)
        return region


empty_in_huge_pages = HugePageRegions().empty


# ------------------------------------------------------------------------------------ during a model load

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h
WHILE_LOADING = 1 << 20
AFTER = 32 << 20  # the highest value to which glibc adapts its threshold
SMAPS = Path("/proc/self/smaps")
AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")


@contextmanager
def separate_blocks() -> Iterator[None]:
    """Inside, malloc maps every large block on its own, so that `free` returns it to the system at once.

    By default glibc takes blocks of some megabytes from the heap after the first such block was freed; then weights
    lie between freed blocks. Measured: an int8 model took 30 % more than its weights so, and 7 % more this way.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(MMAP_THRESHOLD, WHILE_LOADING)
    try:
        yield
    finally:
        # A step's activations are freed and allocated again: do not map them anew each time.
        libc.mallopt(MMAP_THRESHOLD, AFTER)
        libc.mallopt(TRIM_THRESHOLD, 2 * AFTER)
        libc.malloc_trim(0)


def release_file_pages(files: Iterable[str | Path], tensors: Iterable[Tensor]) -> int:
    """Drop resident pages of mapped files; returns their bytes. They stay mapped, and in the system's page cache.

    Only mappings that contain one of `tensors`: another mapping may be gone and its address in use by another
    thread before its pages are dropped. And no mapping that was written to, because its changes would be lost.
    """
    names = {str(Path(file).resolve()) for file in files}
    if not SMAPS.exists():
        return 0
    num_released, kept_tensors = 0, list(tensors)
    places = [tensor.data_ptr() for tensor in kept_tensors]
    for start, end, resident in _unchanged(SMAPS.read_text(encoding="utf-8"), names):
        if not any(start <= place < end for place in places):
            continue
        with suppress(OSError):
            madvise(start, end, mmap.MADV_DONTNEED)
            num_released += resident
    return num_released


def _unchanged(smaps: str, names: set[str]) -> Iterator[tuple[int, int, int]]:
    """(start, end, resident bytes) of mappings of these files that were not written to."""
    area: re.Match[str] | None = None
    resident = 0
    for line in smaps.splitlines():
        if found := AREA.fullmatch(line):
            area = found if found[3] in names else None
        elif area is not None and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
        elif area is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield int(area[1], 16), int(area[2], 16), resident
