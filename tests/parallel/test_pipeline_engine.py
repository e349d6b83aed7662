"""Whole engines with stages as threads: chunks, prefix hits, preemption, grammars, depths; the answers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from equality.engines import greedy, make_checkpoint, prompts

from quire.protocol.output import Logprobs
from quire.protocol.sampling_params import SamplingParams
from tests.parallel.thread_engine import split_engine

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.8, max_tokens=14, ignore_eos=True, seed=5),
    SamplingParams(temperature=1.1, max_tokens=9, ignore_eos=True, seed=6, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("gemma3_text", tmp_path_factory.mktemp("gemma"), **SIZES)


def rows(parts: list[Logprobs | None]) -> list[Any]:
    """Of each position, whatever outputs they came in."""
    there = [part for part in parts if part is not None]
    return [row for part in there for row in zip(part.token_ids, part.values, strict=True)]


def answers(path: str, settings: dict[str, Any], **layout: Any) -> tuple[list[Any], dict[str, Any]]:
    with split_engine(path, **{"size": 1, **layout}, **settings) as engine:
        asked = prompts(9, longest=40)
        params = [PARAMS[index % 3] for index in range(9)]
        found: list[Any] = engine.run(asked, params)
        found += engine.run(asked, greedy(5))  # prefixes are cached now
        said = [
            (
                [token for out in outs for token in out.tokens],
                outs[-1].finish,
                rows([out.logprobs for out in outs]),
                rows([out.prompt_logprobs for out in outs]),
            )
            for outs in found
        ]
        return said, engine.stats()


CASES = {
    "chunks": {"max_num_batched_tokens": 16, "block_size": 8},
    "preemption": {"num_gpu_blocks_override": 40, "block_size": 8, "max_model_len": 64},
    "one plan more": {"async_scheduling": True, "max_num_seqs": 3, "block_size": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pipeline", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_process(case: str, pipeline: int, checkpoint: str) -> None:
    wanted, _ = answers(checkpoint, CASES[case])
    got, stats = answers(checkpoint, CASES[case], pipeline=pipeline)
    assert got == wanted
    assert stats["prefix_hits"] > 0 or case == "preemption"
    assert stats["preemptions"] > 0 or case != "preemption"
