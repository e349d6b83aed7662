"""An engine whose model is split among processes: the same tokens as in one process; and what happens when a rank ends."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, Unsupported
from quire.executor.group import GroupExecutor
from quire.executor.messages import CallFailed

MODEL = "quire-tiny"
PROMPTS = ["The quick brown fox", "1 2 3 4 5", "def add(a, b):", "Once upon a time"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, n=2)


def answers(**options: Any) -> list[Any]:
    llm = LLM(MODEL, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, **options)
    try:
        found = llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY, SAMPLED])
        return [
            (one.token_ids, one.text, one.finish_reason, one.logprobs, request.prompt_logprobs)
            for request in found
            for one in request.outputs
        ]
    finally:
        llm.shutdown()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_and_logprobs_are_those_of_one_process(dtype: str) -> None:
    assert answers(dtype=dtype, tensor_parallel_size=2) == answers(dtype=dtype)


def test_a_rank_that_ends_ends_all() -> None:
    llm = LLM(MODEL, max_model_len=256, tensor_parallel_size=2)
    members = llm.client.core.executor.members  # type: ignore[attr-defined]
    os.kill(members[1].process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker's process was ended by SIG"):
        llm.generate(PROMPTS, GREEDY)
    assert time.monotonic() - began < 30
    llm.shutdown()
    assert all(member.process.poll() is not None for member in members)


def test_a_rank_that_waits_for_a_stopped_one_is_heard_first() -> None:
    """The group waits for rank 0, which is stopped, while rank 1 has said why its step failed."""
    lost = CallFailed("StepFailed", "RankLost: rank 1 of 2 waited for rank 0, which is stopped", "")
    members = [
        SimpleNamespace(process=SimpleNamespace(poll=lambda: None), ready=lambda found=found: found)
        for found in ([], [lost])
    ]
    group = GroupExecutor.__new__(GroupExecutor)
    group.members, group._awaited = members, 0  # type: ignore[assignment]
    with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 waited for rank 0, which is stopped"):
        group._check()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_ends_the_engine_with_its_name(stopped: int) -> None:
    llm = LLM(MODEL, max_model_len=256, tensor_parallel_size=2)
    members = llm.client.core.executor.members  # type: ignore[attr-defined]
    os.kill(members[stopped].process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"waited for rank {stopped}, which is stopped"):
        llm.generate(PROMPTS, GREEDY)
    llm.shutdown()
    assert all(member.process.poll() is not None for member in members)


def test_what_cannot_be_split_is_refused_before_loading() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=3 does not divide the 4 attention heads.*use 2"
    ):
        LLM(MODEL, tensor_parallel_size=3)
    with pytest.raises(Unsupported, match="model-impl transformers"):
        LLM(MODEL, tensor_parallel_size=2, model_impl="transformers")
