"""Limits that leave one token give the greedy text, on every path: one step in one call, by parts, in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine
from tokenizers import Tokenizer

import quire
from quire.ops.cpu.bindings import best
from quire.protocol.sampling_params import SamplingParams

FOLDER = Path(quire.__file__).parent / "embedded" / "quire-tiny"
PROMPT = "Once upon a time there was a"  # greedy decoding meets equal logits in bf16 here
ONE_TOKEN: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_p": 1e-6},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": 1, "min_p": 0.9},
    {"top_p": 0.0001, "temperature": 0.5},
]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(PROMPT).ids
    return ids


def answers(one: Engine, prompt: list[int], wishes: list[dict[str, Any]]) -> list[list[int]]:
    params = [
        SamplingParams(seed=seed, max_tokens=120, **{"temperature": 1.0, **wish})
        for seed, wish in enumerate(wishes)
    ]
    return one.tokens([prompt] * len(wishes), params)


@pytest.mark.parametrize("kernels", [True, False])
def test_one_survivor_is_the_greedy_token(
    prompt: list[int], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setenv("QUIRE_CPU_ISA", "none")
        best.cache_clear()
    try:
        with engine("quire-tiny", dtype="bfloat16") as one:
            (greedy,) = answers(one, prompt, [{"temperature": 0.0}])
            assert len(set(greedy)) > 20
            for wish in ONE_TOKEN if kernels else []:  # alone: one step is one call of the kernels
                assert answers(one, prompt, [wish]) == [greedy], wish
            by_parts = [{**wish, "logprobs": 1} for wish in ONE_TOKEN]
            assert answers(one, prompt, by_parts) == [greedy] * len(by_parts)
    finally:
        best.cache_clear()
