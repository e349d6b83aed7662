"""Zeros that cost nothing until they are used.

Knows how memory comes from the operating system. torch.zeros writes to every page, which takes a second a
gigabyte on some machines; pages of a fresh mapping are zeros already.
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
    """A zeroed tensor. On the CPU its pages are there when they are first touched."""
    where = torch.device(device)
    if where.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=where)
    size = int(np.prod(shape)) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(size + LINE, np.uint8))
    start = -pages.data_ptr() % LINE  # the allocator's own note stands at the start of the mapping
    return pages[start : start + size].view(dtype).view(shape)


def give_back(tensor: Tensor) -> int:
    """Let the operating system have the pages of a tensor that `lazy_zeros` made: so many bytes.

    The tensor stays where it is. What it held is lost; it costs memory again where it is touched.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return 0
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first = start + -start % page  # what shares a page with others stays
    end = (start + tensor.numel() * tensor.itemsize) // page * page
    if end <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return end - first
