"""Limits memory that loading uses beside the weights: glibc's heap, and resident pages of mapped files.

Knows Linux and glibc; does nothing elsewhere. Does not know models.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

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


def release_file_pages(files: Iterable[str | Path], held: Iterable[Tensor]) -> int:
    """Drop resident pages of mapped files; returns their bytes. They stay mapped, and in the system's page cache.

    Only mappings that contain one of the tensors `held`: another mapping may be gone and its address in use by another
    thread before its pages are dropped. And no mapping that was written to, because its changes would be lost.
    """
    names = {str(Path(file).resolve()) for file in files}
    libc = ctypes.CDLL(None, use_errno=True)
    if not SMAPS.exists() or not hasattr(libc, "madvise"):
        return 0
    given, alive = 0, list(held)
    places = [tensor.data_ptr() for tensor in alive]
    for start, end, resident in _unchanged(SMAPS.read_text(encoding="utf-8"), names):
        if not any(start <= place < end for place in places):
            continue
        pages = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        if libc.madvise(*pages, mmap.MADV_DONTNEED) == 0:
            given += resident
    return given


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
