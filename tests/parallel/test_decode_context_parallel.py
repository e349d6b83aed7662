"""Decode context parallelism: ranks keep a part of the blocks each; the same logits, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.attention.decode_context_parallel import DecodeContextParallelAttention, num_kept
from quire.attention.kv_quantization import Part
from quire.attention.reference import ReferenceAttention
from quire.kvcache.specs import CacheSpec
from tests.models.cases import CASES, write
from tests.models.test_native import build
from tests.parallel.test_context_parallel import DealtModel, logits
from tests.parallel.thread_ranks import ThreadRanks, check_bits


class KeptBlocks(DecodeContextParallelAttention):
    """With a cache of this rank's blocks alone."""

    def cache_parts(self, spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[Part, ...]:
        return super().cache_parts(spec, num_kept(num_blocks, self.ranks.size), block_size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama one kv head", "deepseek v3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_logits_have_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path):
    if (name, dtype) == ("deepseek v3", torch.int8):
        pytest.skip("no quantized cache without values")
    case = next(case for case in CASES if case.name == name)
    write(replace(case, config={"max_position_embeddings": 256, **case.config}), tmp_path)
    model = build(tmp_path, model_impl="quire", max_model_len=64)
    wanted = logits(model, dtype=dtype)

    def run(ranks: ThreadRanks) -> list[Tensor]:
        own = build(tmp_path, model_impl="quire", max_model_len=64)
        found = logits(own, dtype=dtype, backend=KeptBlocks(ReferenceAttention(), ranks, 16))
        assert ranks.gathered
        return found

    check_bits((2, 3), run, wanted)


@pytest.mark.parametrize("name", ["llama one kv head", "mistral window"])
def test_ranks_compute_parts_of_a_prompt_and_keep_parts_of_the_blocks(name: str, tmp_path: Path):
    """A rank's part of a step reads other blocks than the other ranks, and all gather the same ones."""
    case = next(case for case in CASES if case.name == name)
    write(replace(case, config={"max_position_embeddings": 256, **case.config}), tmp_path)
    wanted = logits(build(tmp_path, model_impl="quire", max_model_len=64))

    def run(ranks: ThreadRanks) -> list[Tensor]:
        own = build(tmp_path, model_impl="quire", max_model_len=64)
        return logits(DealtModel(own, ranks), backend=KeptBlocks(ReferenceAttention(), ranks, 16))

    check_bits((2, 3), run, wanted)


def test_ranks_keep_each_block_once():
    for num_blocks, size in ((1, 2), (7, 2), (8, 3)):
        kept = [(block % size, block // size + 1) for block in range(num_blocks)]
        assert len(set(kept)) == num_blocks
        assert max(block for _, block in kept) < num_kept(num_blocks, size)
