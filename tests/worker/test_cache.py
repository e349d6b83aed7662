"""The cache's storage: each layer has its own place for what its group's blocks hold, and no byte more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attention.kv_quantization import as_bytes
from quire.attention.reference import ReferenceAttention
from quire.errors import Unsupported
from quire.kvcache.layout import layout
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.layers.attention import Attention
from quire.worker.kv_cache import allocate_cache

BLOCKS, SIZE = 8, 4
FULL, NARROW = CacheSpec(2, 8, 8, "float32"), WindowSpec(2, 8, 8, "float32", window=6)
LARGE, UNLIKE = CacheSpec(1, 32, 32, "float32"), CacheSpec(2, 8, 6, "float32")


def allocated(specs, backend=None):
    layers = [Attention(2, 1, 8) for _ in specs]
    cut = layout(specs, SIZE, 100)
    storages = allocate_cache(
        layers, cut.groups, BLOCKS, SIZE, [backend or ReferenceAttention()] * len(layers)
    )
    return layers, cut, storages


@pytest.mark.parametrize(
    "specs",
    [
        [FULL] * 3,
        [FULL, NARROW, NARROW, FULL, NARROW, NARROW],
        [FULL, NARROW, NARROW, NARROW, NARROW, NARROW],
        [FULL, LARGE, FULL, UNLIKE],
        [NARROW, LARGE, NARROW, NARROW, LARGE, NARROW, FULL],
        [replace(spec, dtype="int8") for spec in (FULL, NARROW, UNLIKE, NARROW)],
        [replace(spec, dtype="fp8_e5m2") for spec in (LARGE, FULL)],
    ],
)
def test_layers_of_a_group_do_not_overlap_and_use_the_planned_bytes(specs):
    layers, cut, storages = allocated(specs)
    planned = cut.bytes_per_block * BLOCKS
    assert sum(part.nbytes for parts in storages for part in parts) == planned
    backend = ReferenceAttention()
    for spec, layer in zip(specs, layers, strict=True):
        wanted = backend.cache_parts(spec, BLOCKS, SIZE)
        assert tuple((tuple(part.shape), part.dtype) for part in layer.spec.cache) == wanted
        assert isinstance(layer.backend, ReferenceAttention)
    # Give every group blocks of its own and let each layer write there: all must be read again.
    blocks = {number: number % BLOCKS for number in range(len(cut.groups))}
    assert len(cut.groups) <= BLOCKS
    for number, layer in enumerate(layers):
        for part in layer.spec.cache:
            as_bytes(part)[blocks[layer.kv_group]] = number + 1
    for number, layer in enumerate(layers):
        assert number in cut.groups[layer.kv_group].layers
        for part in layer.spec.cache:
            assert (as_bytes(part)[blocks[layer.kv_group]] == number + 1).all()


def test_a_backend_that_cannot_share_blocks_is_refused():
    class Odd(ReferenceAttention):
        def cache_parts(self, spec, num_blocks, block_size):
            width = 2 if isinstance(spec, WindowSpec) else 1
            return (((num_blocks, block_size * width, 16), torch.float32),)

    with pytest.raises(Unsupported, match="choose another attention_backend"):
        allocated([FULL, NARROW], Odd())
