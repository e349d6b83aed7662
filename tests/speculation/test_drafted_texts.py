"""Draft tokens beneath texts: stop strings that end within accepted tokens, and several answers to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from worker.known_answers import KnownAnswers

from quire.api.llm import LLM
from quire.features.speculation.hook import SpeculationHook
from quire.protocol.sampling_params import SamplingParams

PROMPTS = ["Tell me a story about a fox.", "Once upon a time there was"]
MOST = 60
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": "8M"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}


def asked(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MOST, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("quire-tiny", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(plain: LLM) -> dict[tuple[int, ...], list[int]]:
    found = plain.generate(PROMPTS, asked(), use_tqdm=False)
    return {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in found}


@contextmanager
def drafted(answers: dict[tuple[int, ...], list[int]]) -> Iterator[LLM]:
    """All draft tokens of these answers are right."""
    with LLM("quire-tiny", **SETTINGS, speculative_config=DRAFTS) as llm:
        hooks = llm.client.core.executor.worker.hooks  # type: ignore[attr-defined]
        hook = next(hook for hook in hooks if isinstance(hook, SpeculationHook))
        hook.drafter = KnownAnswers(answers, 1.0)
        yield llm


def accepted(llm: LLM) -> float:
    counts: dict[str, float] = llm.client.call("stats")["counts"]
    return counts["spec_decode_num_accepted_tokens"]


def outputs(llm: LLM, each: list[SamplingParams]) -> list[Any]:
    """Of every prompt with each parameters."""
    prompts = [prompt for prompt in PROMPTS for _ in each]
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.cumulative_logprob)
        for found in llm.generate(prompts, each * len(PROMPTS), use_tqdm=False)
        for one in found.outputs
    ]


def test_stop_strings_end_within_accepted_tokens(
    plain: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    texts = [one.outputs[0].text for one in plain.generate(PROMPTS, asked(), use_tqdm=False)]
    stops = [text[at : at + 4] for text in texts for at in range(9, len(text) - 4, 29)]
    each = [
        asked(stop=[stop], include_stop_str_in_output=number % 2 > 0, logprobs=0)
        for number, stop in enumerate(stops)
    ]
    expected = outputs(plain, each)
    assert {reason for *_, reason, _ in expected} > set(stops)
    with drafted(answers) as llm:
        assert outputs(llm, each) == expected
        assert accepted(llm) > 50


def test_several_answers_to_a_prompt(plain: LLM, answers: dict[tuple[int, ...], list[int]]) -> None:
    """One answer of each prompt is the drafter's; the others get wrong draft tokens."""
    params = asked(n=3, temperature=0.8, seed=5, logprobs=0, max_tokens=24)
    expected = outputs(plain, [params])
    assert len({text for text, *_ in expected}) > 3
    known = {prompt: expected[3 * at][1] for at, prompt in enumerate(answers)}
    with drafted(known) as llm:
        assert outputs(llm, [params]) == expected
        assert accepted(llm) > 20
