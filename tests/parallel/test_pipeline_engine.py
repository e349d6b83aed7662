"""Whole engines with stages as threads: chunks, prefix hits, preemption, draft tokens, depths; the answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts
from tokenizers import Tokenizer

from quire.features.speculation.hook import SpeculationHook
from quire.models.checkpoint_locator import EMBEDDED
from quire.protocol.output import Logprobs
from quire.protocol.sampling_params import SamplingParams
from tests.models.cases import write
from tests.models.recurrent_cases import CASES as RECURRENT
from tests.parallel.thread_engine import split_engine
from tests.speculation import test_speculation as speculation
from tests.worker.known_answers import KnownAnswers

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pipeline", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_process(case: str, pipeline: int, checkpoint: str) -> None:
    wanted, _ = answers(checkpoint, CASES[case])
    got, stats = answers(checkpoint, CASES[case], pipeline=pipeline)
    assert got == wanted
    assert stats["prefix_hits"] > 0 or case == "preemption"
    assert stats["preemptions"] > 0 or case != "preemption"


DRAFTS = speculation.config(3, adaptive=False)
NUM_DRAFTS, NUM_ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"


def drafted(one: Engine, wanted: list[Any], texts: list[list[int]], params: Any) -> dict[str, Any]:
    """The counts of draft tokens, of which most are right; the answers must be these. Only the last stage has a drafter."""
    *before, last = one.client.core.executor.workers  # type: ignore[attr-defined]
    assert not [hook for worker in before for hook in worker.hooks if hook.name == "speculation"]
    (hook,) = [hook for hook in last.hooks if isinstance(hook, SpeculationHook)]
    known = {tuple(text): answer[0] for text, answer in zip(texts, wanted, strict=True)}
    hook.drafter = KnownAnswers(known, 0.8)
    assert speculation.answers(one, params, texts) == wanted
    counts: dict[str, Any] = one.stats()["counts"]
    assert 20 < counts[NUM_ACCEPTED] < counts[NUM_DRAFTS]
    return counts


@pytest.mark.parametrize("case", [pytest.param("chunks", marks=pytest.mark.slow), "preemption"])
@pytest.mark.parametrize("pipeline", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_draft_tokens(case: str, pipeline: int, checkpoint: str) -> None:
    texts, params = prompts(4, longest=30), speculation.PARAMS[3:7]
    with engine(checkpoint) as one:
        wanted = speculation.answers(one, params, texts)
    settings = {**CASES[case], "max_model_len": 128, "speculative_config": DRAFTS}
    if case == "preemption":
        settings["num_gpu_blocks_override"] = 50
    with split_engine(checkpoint, 1, pipeline=pipeline, **settings) as one:
        drafted(one, wanted, texts, params)
        assert one.stats()["preemptions"] > 0 or case != "preemption"


def test_draft_tokens_of_recurrent_layers(tmp_path: Path) -> None:
    """The states of each stage are taken back. As with torchrun, each stage gets the results; here the results of the first one count."""
    write(next(case for case in RECURRENT if case.name == "qwen3_5 tiled"), tmp_path)
    texts, params = [[7 * place % 97 + 3 for place in range(9)], [4, 5, 6]], speculation.PARAMS[1:3]
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 96}
    with engine(str(tmp_path), **settings) as one:
        wanted = speculation.answers(one, params, texts)
    with split_engine(str(tmp_path), 1, pipeline=2, speculative_config=DRAFTS, **settings) as one:
        group: Any = one.client.core.executor
        group.answering = [0, 1]
        for worker in group.workers:
            worker.answers = True
        drafted(one, wanted, texts, params)


def test_a_draft_model_is_in_the_last_stage() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "quire-tiny" / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in ("1, 2, 3, 4, 5,", "Once upon a time")]
    params = [greedy(16), SamplingParams(seed=1, max_tokens=16, ignore_eos=True)]
    drafts = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}
    settings = {"dtype": "bfloat16", "max_model_len": 128, "speculative_config": drafts}
    with engine("quire-tiny", **settings) as one:
        wanted, counts = speculation.answers(one, params, texts), one.stats()["counts"]
    with split_engine("quire-tiny", 1, pipeline=2, **settings) as one:
        assert speculation.answers(one, params, texts) == wanted
        found = one.stats()["counts"]
        assert found[NUM_ACCEPTED] == counts[NUM_ACCEPTED] > 0
        workers = one.client.core.executor.workers  # type: ignore[attr-defined]
        assert [len(worker.models) for worker in workers] == [1, 2]
