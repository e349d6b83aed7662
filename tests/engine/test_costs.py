"""Computed step costs against the checkpoint's own sizes, counted position by position, and against /metrics."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import make_checkpoint

from quire.api.llm import LLM
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.observe.mfu import FLOPS, READ, WRITTEN, StepCosts
from quire.protocol.plan import WorkItem
from quire.protocol.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def shapes(path: str) -> dict[str, list[int]]:
    """Shape of every tensor of the checkpoint."""
    raw = (Path(path) / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    found = json.loads(raw[8 : 8 + size])
    return {name: one["shape"] for name, one in found.items() if name != "__metadata__"}


def costs_of(path: str) -> tuple[StepCosts, dict[str, Any], CacheSpec]:
    config = json.loads((Path(path) / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    spec = CacheSpec(kv, dim, dim, "float32")
    sizes = shapes(path)
    weights = 4 * sum(map(math.prod, sizes.values()))
    return StepCosts.of(config, [spec] * config["num_hidden_layers"], weights, 4), config, spec


def test_weight_bytes_equal_the_checkpoints(path: str) -> None:
    costs, config, _ = costs_of(path)
    sizes = shapes(path)
    matrices = {name: math.prod(shape) for name, shape in sizes.items() if len(shape) == 2}
    tables = [size for name, size in matrices.items() if "embed" in name or "lm_head" in name]
    assert costs.layers == sum(matrices.values()) - sum(tables)
    assert costs.head == tables[0]
    read = sum(map(math.prod, sizes.values())) - (0 if config["tie_word_embeddings"] else tables[0])
    assert costs.weight_bytes + costs.head_bytes == 4 * read


@pytest.mark.parametrize("window", [0, 1, 5, 8])
@pytest.mark.parametrize("start", [0, 3, 5, 9])
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_every_position_one_by_one(window: int, start: int, num_tokens: int) -> None:
    sizes = 2, 16, 8, "bfloat16"
    spec = WindowSpec(*sizes, window=window) if window else CacheSpec(*sizes)
    costs = StepCosts(0, 0, 0, 0, ((spec, 3),), num_heads=4)
    seen = [range(spec.first_needed(p), p + 1) for p in range(start, start + num_tokens)]
    products = sum(len(one) for one in seen) * 4 * (16 + 8) * 3
    assert costs.flops(WorkItem(0, num_tokens), start) == 2 * products
    each = 2 * (16 + 8) * 2 * 3
    looked_at = set().union(*seen)
    assert costs.kv_bytes(WorkItem(0, num_tokens), start) == (
        each * len(looked_at),
        each * num_tokens,
    )


def test_mixture_models_count_only_active_experts() -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10, "intermediate_size": 100,
              "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 1}  # fmt: skip
    spec = CacheSpec(1, 4, 4, "float32")
    assert StepCosts.of(config, [spec], 10**6, 4).layers == 8 * (2 + 1) * 8 + 8 * 5 * 3 * 3


def test_metrics_report_the_costs_of_steps(path: str) -> None:
    costs, _, _ = costs_of(path)
    prompt, outputs, chunk = 40, 6, 16
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory_bytes": "4M",
        "max_num_batched_tokens": chunk,
    }
    wanted = dict.fromkeys((FLOPS, READ, WRITTEN), 0.0)
    lengths = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
    lengths += [(prompt + at, 1) for at in range(outputs - 1)]
    for start, num_tokens in lengths:
        item = WorkItem(0, num_tokens, samples=start + num_tokens >= prompt)
        read, written = costs.kv_bytes(item, start)
        wanted[FLOPS] += costs.flops(item, start)
        wanted[READ] += read + costs.weight_bytes + costs.head_bytes * item.samples
        wanted[WRITTEN] += written
    with LLM(path, enable_mfu_metrics=True, **options) as llm:
        llm.generate(
            [[5] * prompt], SamplingParams(max_tokens=outputs, ignore_eos=True), use_tqdm=False
        )
        told = {one.name: one.value for one in llm.get_metrics() if "estimated" in one.name}
    assert told == {f"vllm:estimated_{key}_per_gpu": value for key, value in wanted.items()}
    with LLM(path, **options) as llm:
        assert not [one for one in llm.get_metrics() if "estimated" in one.name]
