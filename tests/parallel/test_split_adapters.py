"""Adapters of a model that ranks split: each row has the bits of one process, and each rank its part of B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equality.engines import make_checkpoint, prompts
from lora.adapters import PREFIX, Answer, planned, run, write

from quire.config.engine import EngineConfig
from quire.engine.resolve import resolve_config
from quire.features.lora.registry import OTHER_FILES, merged
from quire.protocol.sampling_params import SamplingParams
from tests.parallel.thread_engine import split_engine

HIDDEN, INNER, WORDS, LAYERS = 128, 256, 384, 2
SIZES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HIDDEN, HIDDEN // 2)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (HIDDEN, INNER)),
    "mlp.down_proj": (INNER, HIDDEN),
}
NAMES = ["plain", "dora", "table"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0, logprobs=3)
GIVEN = prompts(3, seed=5, longest=40)


def tensors(rank: int, seed: int, dora: bool = False) -> dict[str, torch.Tensor]:
    draw, found = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for module, (ins, outs) in SIZES.items():
            name = f"{PREFIX}model.layers.{layer}.{module}.lora_"
            found[name + "A.weight"] = torch.randn(rank, ins, generator=draw) * 0.1
            found[name + "B.weight"] = torch.randn(outs, rank, generator=draw) * 0.1
            if dora:
                found[name + "magnitude_vector"] = torch.rand(outs, generator=draw) + 2.0
            else:
                found[name + "B.bias"] = torch.randn(outs, generator=draw) * 0.1
    return found


def table(rank: int) -> dict[str, torch.Tensor]:
    """Of the head and the embedding."""
    draw = torch.Generator().manual_seed(1)
    made = {
        "lm_head.lora_A.weight": (rank, HIDDEN),
        "lm_head.lora_B.weight": (WORDS, rank),
        "model.embed_tokens.lora_embedding_A": (rank, WORDS),
        "model.embed_tokens.lora_embedding_B": (HIDDEN, rank),
    }
    return {
        PREFIX + name: torch.randn(*shape, generator=draw) * 0.2 for name, shape in made.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("split-lora")
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "vocab_size": WORDS,
        "num_hidden_layers": LAYERS,
    }
    make_checkpoint("llama", made / "model", **sizes)
    write(made / "plain", made=tensors(4, 0), lora_bias=True)
    write(made / "dora", made=tensors(3, 2, dora=True), r=3, use_dora=True)
    write(made / "table", made=table(4))
    return made


def answers(folder: Path, size: int = 1, **settings: Any) -> tuple[list[Answer], list[int]]:
    """The answers, and the bytes that each adapter takes in the first rank."""
    asked = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, **settings}
    mixed = [(prompt, name) for prompt in GIVEN for name in (None, *NAMES)]
    with split_engine(str(folder / "model"), size, **asked) as one:
        for name in NAMES:
            one.client.call("load_lora", name, str(folder / name))
        found = run(one, [prompt for prompt, _ in mixed], [name for _, name in mixed], PARAMS)
        return found, [card["bytes"] for card in one.client.call("list_loras")]


# Of 4 ranks two have the same key heads. Of 2 stages the first has the embedding, and the last has the head.
LAYOUTS = {"float32": [{"size": 2}, {"size": 4}], "bfloat16": [{"size": 2}, {"pipeline": 2}]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_one_process(folder: Path, dtype: str) -> None:
    whole, of_whole = answers(folder, dtype=dtype)
    assert len({str(answer) for answer in whole}) == len(whole)
    for layout in LAYOUTS[dtype]:
        found, of_rank = answers(folder, dtype=dtype, max_num_batched_tokens=32, **layout)
        assert found == whole
        assert all(own < each for own, each in zip(of_rank, of_whole, strict=True))


def test_the_plan_counts_what_a_rank_has(folder: Path) -> None:
    modules = [{"name": "plain", "path": str(folder / "plain"), "base_model_name": None}]
    asked = {
        "enable_lora": True,
        "max_cpu_loras": 2,
        "max_lora_rank": 4,
        "lora_modules": modules,
        "dtype": "float32",
    }
    for size, stages in ((1, 1), (2, 1), (1, 2)):
        config = EngineConfig.from_keywords(
            model=str(folder / "model"),
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            max_model_len=256,
            max_num_seqs=8,
            **asked,
        )
        plan = planned(resolve_config(config))
        factors = LAYERS * sum(ins + outs // size for ins, outs in SIZES.values())
        biases = LAYERS * sum(outs for _, outs in SIZES.values())
        known, to_come = 4 * factors * 4 + biases * 4, 4 * factors // stages * 4
        assert plan.num_line_bytes == known + to_come


def test_ranks_that_read_different_files_refuse_an_adapter() -> None:
    one, other = {"version": "a", "rank": 4, "bytes": 9}, {"version": "b", "rank": 4, "bytes": 9}
    assert merged([{1: one, 2: one}, {1: one, 2: other}]) == {1: one, 2: {"error": OTHER_FILES}}
    assert merged([{1: one, 2: one}, {1: {"error": "no"}}]) == {1: {"error": "no"}}
