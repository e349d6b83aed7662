"""Zeroed tensors whose memory is allocated on first use.

Knows how the operating system maps memory. torch.zeros writes to every page, which takes a second per
gigabyte on some machines; the pages of a new mapping are already zero.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes of a cache line


def lazy_zeros(
    shape: tuple[int, ...] | int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """A zeroed tensor. On the CPU the system allocates its pages when they are first touched."""
    where = torch.device(device)
    if where.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=where)
    size = int(np.prod(shape)) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(size + LINE, np.uint8))
    start = -pages.data_ptr() % LINE  # the allocator's header is at the start of the mapping
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
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return end - first
