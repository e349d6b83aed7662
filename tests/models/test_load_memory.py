"""Memory of a load beside the weights: file pages are released, parts wait for their join, pieces give the same weights."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quire.layers.embedding import Head
from quire.layers.linear import Linear
from quire.layers.weights import weights_of
from quire.models.construction import construction
from quire.ops.cpu.bindings import best
from quire.platforms import memory
from quire.quantization import apply, int8
from quire.quantization.bf16_packed import PackedBf16Weight

PAGES = 64
FIXED_NOREPLACE = 0x100000  # of Linux: there, or nowhere


@pytest.fixture
def mapped(tmp_path):
    path = tmp_path / "weights"
    np.arange(PAGES * 1024, dtype=np.float32).tofile(path)
    return path, torch.from_file(str(path), shared=False, size=PAGES * 1024)


def resident(path: Path) -> int:
    """Bytes of the file's mapping that the process holds."""
    total, inside = 0, False
    for line in memory.SMAPS.read_text().splitlines():
        if memory.AREA.fullmatch(line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_mapped_file_pages_are_released_and_read_again(mapped):
    path, tensor = mapped
    whole = float(tensor.double().sum())
    assert resident(path) == PAGES * 4096
    assert memory.release_file_pages([path], [tensor]) == PAGES * 4096
    assert resident(path) == 0
    assert float(tensor.double().sum()) == whole


def test_a_modified_mapping_keeps_its_changes(mapped):
    path, tensor = mapped
    tensor[5] = -1.0
    assert memory.release_file_pages([path], [tensor]) == 0
    assert float(tensor[5]) == -1.0


def test_other_mappings_are_not_released(mapped, tmp_path):
    path, tensor = mapped
    assert float(tensor[0]) == 0.0
    held = resident(path)
    assert held > 0
    assert memory.release_file_pages([tmp_path / "another"], [tensor]) == 0
    assert resident(path) == held


def test_a_reused_address_is_not_released(mapped, tmp_path, monkeypatch):
    """(Two engines that were loaded at once: one gave back pages of a file that the other had done with, and in whose
    place its weights lay by then.)"""
    path, _ = mapped
    copy = tmp_path / "smaps"
    gone = torch.from_file(str(path), shared=False, size=PAGES * 1024)
    place, size = gone.data_ptr(), PAGES * 4096
    copy.write_text(memory.SMAPS.read_text())
    monkeypatch.setattr(memory, "SMAPS", copy)
    del gone
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)  # fmt: skip
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE
    if libc.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0) != place:
        pytest.skip("another thread was quicker")
    ctypes.memset(place, 7, size)
    memory.release_file_pages([path], [])
    assert ctypes.string_at(place, size) == b"\7" * size
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))


@pytest.mark.skipif(best() is None, reason="no kernels")
@pytest.mark.parametrize("parts", [{"q": 32, "k": 48}, {"q": 40, "k": 56}])
def test_pieces_are_packed_as_the_whole_weight(parts: dict[str, int]):
    """Also such that begin within a panel, and a last panel that is not full."""
    kernels, loaded = best(), {name: torch.randn(n, 64).bfloat16() for name, n in parts.items()}
    with torch.device("meta"), construction(torch.bfloat16):
        layer = Linear(64, parts)
    for name, slot in layer.slots("layer").items():
        slot.fill(loaded[name.split(".")[-2]], torch.device("cpu"), name)
    assert apply.pack_weights(layer.weights()) == 1
    want = PackedBf16Weight.of(kernels, torch.cat(list(loaded.values())))
    assert torch.equal(layer.ref.prepared.data, want.data)


def test_joined_weights_are_contiguous():
    with torch.device("meta"):
        layer = Linear(3, {"q": 2, "k": 1})
    slots = layer.slots("layer")
    parts = {name: torch.randn(slot.shape()) for name, slot in slots.items()}
    for name, slot in slots.items():
        slot.fill(parts[name], torch.device("cpu"), name)
    assert layer.weight.is_meta
    layer.join()
    assert torch.equal(layer.weight, torch.cat(list(parts.values())))
    layer.weight.data.zero_()
    layer.join()  # nothing waits any more
    assert not layer.weight.any()


@pytest.mark.parametrize("make", [lambda: Linear(4, 3), lambda: Head(3, 4)])
def test_conversion_happens_after_the_join(make):
    """(An untied head of float32 lay there in bfloat16 beside its int8 form, and so did half the layers' weights.)"""
    with torch.device("meta"):
        layer = make()
    (slot,) = layer.slots("layer").values()
    stored = torch.randn(3, 4).half()
    slot.fill(stored, torch.device("cpu"), "layer.weight")
    assert layer.weight.is_meta
    layer.join()
    assert torch.equal(layer.weight, stored.float())
    whole = torch.randn(3, 4)
    slot.fill(whole, torch.device("cpu"), "layer.weight")
    assert layer.weight.data_ptr() == whole.data_ptr()  # nothing to convert: nothing to wait for


def test_the_original_head_is_freed_before_layers_are_quantized(monkeypatch):
    head, layer, seen = Head(64, 64), Linear(64, 64), []
    before = weakref.ref(head.weight)
    make = int8.Int8Weight.of
    makers = apply.MAKERS["int8"]
    makers = makers._replace(on_cpu=lambda *args: seen.append(before()) or make(*args))
    monkeypatch.setitem(apply.MAKERS, "int8", makers)
    assert apply.quantize_weights(weights_of(nn.ModuleList([layer, head])), "int8") == 2
    assert seen == [None]


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_quantizing_in_pieces_gives_the_same_weight(monkeypatch, at_once):
    weight = torch.randn(70, 64)
    q_OI, scale_O = int8.quantize(weight)
    monkeypatch.setattr(int8, "MAX_FLOATS", at_once)
    made = int8.Int8Weight.of(weight, False, None)
    assert torch.equal(made.q_OI, q_OI)
    assert torch.equal(made.scale_O, scale_O)


def test_large_blocks_come_back_to_the_system():
    def held() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    def kept() -> int:
        """Of 120 MiB, after half of it was let go."""
        before = held()
        blocks = [torch.ones(3 << 18) for _ in range(40)]  # 3 MiB each
        del blocks[::2]
        return held() - before

    torch.ones(4 << 20)  # let go at once: from here on, by itself, the heap would take such blocks
    with memory.separate_blocks():
        assert min(kept() for _ in range(3)) < 95 << 20  # other threads of the run take some
