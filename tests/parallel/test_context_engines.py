"""Engines whose ranks share the tokens of prompts, or keep a part of the KV cache's blocks each: the same answers as of one process."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_llama import make_checkpoint

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_without_weights
from quire.errors import ConfigError, Unsupported
from quire.kvcache.layout import layout
from quire.kvcache.specs import CacheSpec
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import RankAddress, addresses
from quire.worker.memory_forecast import construct_part
from tests.parallel.process_engine import outcomes

PROMPTS = ["The quick brown fox jumps over " * 6, "1 2 3 4 5", "def add(a, b):" * 9, "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=16, n=2)


def answers(model: str, **options: Any) -> list[Any]:
    with LLM(model, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=96, **options) as llm:
        found = llm.generate(PROMPTS, [GREEDY, SAMPLED, SAMPLED, GREEDY])
        # the second time, blocks of prompts are cached
        return outcomes(found + llm.generate(PROMPTS[:1], GREEDY))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prefill_context_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"prefill_context_parallel_size": 2, "dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param({"prefill_context_parallel_size": 3, "kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"prefill_context_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_in_parts(options: dict[str, Any]):
    same = {name: value for name, value in options.items() if name.endswith("dtype")}
    assert answers("quire-tiny", **options) == answers("quire-tiny", **same)


@pytest.fixture(scope="module")
def one_kv_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    # heads that the CPU kernels have: torch's attention in bf16 may round a row as its batch is
    return str(make_checkpoint(tmp_path_factory.mktemp("one"), kv_heads=1, head=32))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 4}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"prefill_context_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_in_parts(one_kv_head: str, options: dict[str, Any]):
    found = answers(one_kv_head, **{"decode_context_parallel_size": 2, **options})
    assert found == answers(one_kv_head)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_in_parts_for_the_kernels(kv_cache_dtype: str):
    ranks = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    options = {"kv_cache_dtype": kv_cache_dtype}
    assert answers("quire-tiny", **ranks, **options) == answers("quire-tiny", **options)


def test_ranks_that_keep_parts_have_room_for_more_tokens():
    """A block costs its part, and one layer of the whole of it while a step computes that layer."""
    whole = layout([CacheSpec(1, 64, 64, "bfloat16")] * 32, 16, 4096)
    blocks = [whole.divided(ranks).bytes_per_block for ranks in (2, 4)]
    one_layer = whole.bytes_per_block / 32
    assert blocks == [16 * one_layer + 1.5 * one_layer, 8 * one_layer + 1.25 * one_layer]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, ConfigError,
         "tensor_parallel_size=2, prefill_context_parallel_size=1 and 2 KV heads it can be 1; use 1"),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, ConfigError, "can be 1 or 2; use 2"),
        ({"prefill_context_parallel_size": 2, "tensor_parallel_size": 4, "decode_context_parallel_size": 3}, ConfigError,
         "can be 1 or 2 or 4; use 2"),
        ({"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2, "speculative_config": {"method": "ngram",
         "num_speculative_tokens": 2}}, Unsupported, "decode_context_parallel_size=2 with --speculative-config"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_keep_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
):
    with pytest.raises(error, match=message):
        LLM(make_checkpoint(tmp_path), **options)


def test_recurrent_layers_are_refused_before_loading(tmp_path: Path):
    config = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 32,
        "vocab_size": 99,
    }
    sizes = {
        "num_hidden_layers": 2,
        "state_size": 8,
        "conv_kernel": 4,
        "time_step_rank": 2,
        "intermediate_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    given = EngineConfig.from_keywords(
        model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64
    )
    spec = resolve_without_weights(given)[0].spec
    with pytest.raises(Unsupported, match=r"prefill_context_parallel_size=2 for Mamba.*recurrent"):
        construct_part(spec, RankLayout(prefill=2))


def test_each_group_exchanges_by_itself():
    """2 parts of a context, of 4 ranks for each layer, of which 2 neighbours of each part keep the blocks of the same heads."""
    shape = RankLayout(prefill=2, tensor=4, decode=4)

    def run(address: RankAddress) -> list[list[int]]:
        ranks = msgspec.structs.replace(address, fd=os.dup(address.fd)).join()
        number = torch.tensor([[address.rank]])
        return [
            group.gather(number)[0].tolist()
            for group in (ranks.tensor, ranks.context, ranks.blocks)
            if group is not None
        ]

    with addresses(shape) as found, ThreadPoolExecutor(shape.size) as threads:
        for rank, groups in enumerate(threads.map(run, found)):
            assert groups == [
                shape.tensor_group(rank), shape.context_group(rank), shape.blocks_group(rank),
            ]  # fmt: skip
    groups = [shape.blocks_group(rank) for rank in (0, 3, 6)]
    assert groups == [[0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]
    assert [RankLayout(2, 1, 4, decode=2).blocks_group(rank) for rank in (1, 6)] == [[0, 1], [6, 7]]
    assert [RankLayout(2, 2, 2, decode=2).blocks_group(rank) for rank in (1, 6)] == [[1, 3], [4, 6]]
