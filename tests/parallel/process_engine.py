"""Engines whose ranks are processes, for tests: what they are asked, their answers, and the end of all with one of them."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import EngineDeadError

MODEL = "quire-tiny"
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PROMPTS = ["The quick brown fox", "1 2 3 4 5", "def add(a, b):", "Once upon a time"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, n=2)


def outcomes(requests: list[RequestOutput]) -> list[Any]:
    """Everything in which the outputs of two engines could differ."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, request.prompt_logprobs)
        for request in requests
        for one in request.outputs
    ]


def answers(llm: LLM) -> list[Any]:
    return outcomes(llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY, SAMPLED]))


def answers_with(**options: Any) -> list[Any]:
    """Those of a new engine."""
    with LLM(MODEL, **SETTINGS, **options) as llm:
        return answers(llm)


@cache
def expected(dtype: str) -> list[Any]:
    """The answers of one process."""
    return answers_with(dtype=dtype)


def end_rank(llm: LLM, rank: int) -> None:
    """Kill a rank's process: the next request fails with the reason, and no rank is left."""
    members = llm.client.core.executor.members  # type: ignore[attr-defined]
    os.kill(members[rank].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker's process was ended by SIG"):
        llm.generate(PROMPTS, GREEDY)
    assert time.monotonic() - began < 30
    llm.shutdown()
    assert all(member.process.poll() is not None for member in members)
