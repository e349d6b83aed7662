"""An engine whose model is split among processes: the same answers as in one process; and what happens when a rank ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from quire import LLM
from quire.errors import ConfigError, EngineDeadError, Unsupported
from tests.parallel.process_engine import (
    GREEDY,
    MODEL,
    PROMPTS,
    SETTINGS,
    answers,
    answers_with,
    end_rank,
    expected,
)


@pytest.fixture(scope="module")
def split() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS, dtype="bfloat16", tensor_parallel_size=2) as llm:
        yield llm


def test_answers_are_those_of_one_process(split: LLM) -> None:
    assert answers(split) == expected("bfloat16")


@pytest.mark.slow
def test_answers_in_float32_are_those_of_one_process() -> None:
    assert answers_with(dtype="float32", tensor_parallel_size=2) == expected("float32")


def test_a_rank_that_ends_ends_all(split: LLM) -> None:
    """The last of this engine."""
    end_rank(split, 1)


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
