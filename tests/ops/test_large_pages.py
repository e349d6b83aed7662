"""Regions of large pages: tensors in them are apart, lie as asked, and take their memory with them when they go."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from quire.ops.cpu.huge_pages import LINE, PAGE, REGION, Regions

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is torch's own")


def mapping_of(address: int) -> str | None:
    """What /proc/self/smaps says of the mapping with this address."""
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in entry.split()[0].split("-"))
        if start <= address < end:
            return entry
    return None


def test_tensors_do_not_overlap_and_hold_what_is_written():
    sizes = [1, 3 << 19, REGION // 2 + 5, 7, REGION + 1, 0, 12]
    regions = Regions()
    made = [regions.empty(size, torch.int8) for size in sizes]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert [t.numel() for t in made] == sizes
    assert [set(t.unique().tolist()) for t in made] == [
        {n} if size else set() for n, size in enumerate(sizes)
    ]


def test_shapes_and_formats_are_those_of_torch():
    tensor = Regions().empty((3, 5, 7), torch.bfloat16)
    like = torch.empty(3, 5, 7, dtype=torch.bfloat16)
    assert tensor.shape == like.shape
    assert tensor.stride() == like.stride()
    assert tensor.dtype == like.dtype


@linux
def test_large_pages_are_asked_for_and_a_region_begins_with_one():
    regions = Regions()
    first, second = regions.empty(100, torch.uint8), regions.empty(100, torch.uint8)
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + LINE
    flags = re.search(r"VmFlags:(.*)", mapping_of(first.data_ptr()) or "")
    assert flags is not None
    assert "hg" in flags[1].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@linux
def test_a_region_goes_with_its_last_tensor():
    regions = Regions()
    first, second = (regions.empty(PAGE, torch.uint8) for _ in range(2))
    address = second.data_ptr()
    del first
    gc.collect()
    assert second.fill_(3).max() == 3
    del second
    gc.collect()
    entry = mapping_of(address)
    assert entry is None or "hg" not in entry.split("VmFlags:")[1].split()
