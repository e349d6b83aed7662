"""With a quantized KV cache, tokens do not depend on the batch: alone, batched, chunked, cached, preempted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from engines import engine, greedy, prompts

from quire.ops.cpu.bindings import best

COUNT = 24
FORMATS = ["int8", "fp8"]
SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 12, "max_model_len": 96},
}
MODELS = [
    ("qwen3", "float32", "int8"),
    ("qwen3", "float32", "fp8"),
    ("gemma3_text", "float32", "int8"),
    ("qwen3", "bfloat16", "int8"),
    ("qwen3", "bfloat16", "fp8"),
]


@cache
def alone(path: str, dtype: str, kept: str) -> list[list[int]]:
    with engine(path, dtype=dtype, kv_cache_dtype=kept, block_size=16) as one:
        return [one.tokens([prompt], greedy(COUNT))[0] for prompt in prompts(6)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("kind", "dtype", "kept"), MODELS)
def test_batching_changes_no_token(
    kind: str, dtype: str, kept: str, setting: str, checkpoint: Callable[..., str]
) -> None:
    if dtype == "bfloat16" and best() is None:
        pytest.skip("in bfloat16 only the kernels keep bits apart")
    path = checkpoint(kind)
    settings = {"dtype": dtype, "kv_cache_dtype": kept, "block_size": 16, **SETTINGS[setting]}
    if setting == "preempted" and kind == "gemma3_text":  # several groups share the blocks
        settings["num_gpu_blocks_override"] = 32
    with engine(path, **settings) as one:
        assert one.tokens(prompts(6), greedy(COUNT)) == alone(path, dtype, kept)
        assert (one.stats()["preemptions"] > 0) == (setting == "preempted")
        if setting == "batched":  # once more, on cached prefixes
            assert one.tokens(prompts(6), greedy(COUNT)) == alone(path, dtype, kept)
            assert one.stats()["prefix_hits"] > 0


def test_the_cache_has_the_requested_format(checkpoint: Callable[..., str]) -> None:
    """Its bytes, and that another format gives another text."""
    path, found = checkpoint("qwen3"), {}
    for kept in ("auto", *FORMATS):
        room = {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 512, "max_num_seqs": 512}
        with engine(path, dtype="bfloat16", kv_cache_dtype=kept, block_size=16, **room) as one:
            found[kept] = one.client.ready.num_blocks
    assert found["int8"] == found["fp8"]
    assert found["int8"] / found["auto"] == pytest.approx(2 * 32 / (32 + 4), rel=0.02)
    assert alone(path, "float32", "int8") != alone(path, "float32", "fp8")
