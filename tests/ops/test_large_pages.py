"""HugePageRegions of large pages: tensors in them are apart, lie as asked, and take their memory with them when they go."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from quire.platforms.memory import ALIGNMENT, HUGE_PAGE, REGION_BYTES, HugePageRegions

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is torch's own")


def mapping_of(address: int) -> str | None:
    """What /proc/self/smaps says of the mapping with this address."""
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in entry.split()[0].split("-"))
        if start <= address < end:
            return entry
    return None


def test_tensors_do_not_overlap():
    sizes = [1, 3 << 19, REGION_BYTES // 2 + 5, 7, REGION_BYTES + 1, 0, 12]
    regions = HugePageRegions()
    made = [regions.empty(size, torch.int8) for size in sizes]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert [t.numel() for t in made] == sizes
    for number, tensor in enumerate(made):
        assert not tensor.numel() or tensor.min() == tensor.max() == number


def test_shapes_and_dtypes_equal_torchs():
    tensor = HugePageRegions().empty((3, 5, 7), torch.bfloat16)
    like = torch.empty(3, 5, 7, dtype=torch.bfloat16)
    assert tensor.shape == like.shape
    assert tensor.stride() == like.stride()
    assert tensor.dtype == like.dtype


@linux
def test_a_region_is_aligned_and_requests_huge_pages():
    regions = HugePageRegions()
    first, second = regions.empty(100, torch.uint8), regions.empty(100, torch.uint8)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT
    flags = re.search(r"VmFlags:(.*)", mapping_of(first.data_ptr()) or "")
    assert flags is not None
    assert "hg" in flags[1].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@linux
def test_a_region_is_unmapped_with_its_last_tensor():
    regions = HugePageRegions()
    first, second = (regions.empty(HUGE_PAGE, torch.uint8) for _ in range(2))
    address = second.data_ptr()
    del first
    gc.collect()
    assert second.fill_(3).max() == 3
    del second
    gc.collect()
    entry = mapping_of(address)
    assert entry is None or "hg" not in entry.split("VmFlags:")[1].split()
