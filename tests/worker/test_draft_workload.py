"""Draft tokens never change an answer, whatever the worker and the scheduler do meanwhile; and a broken rule is noticed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import draft_workload
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from mutations import mutated

TRIALS = 10


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # the workloads preempt, and fail requests, on purpose
    yield
    logging.disable(logging.NOTSET)


def test_answers_are_those_without_draft_tokens() -> None:
    counts: dict[str, float] = {}
    for seed in range(TRIALS):
        for name, value in draft_workload.trial(seed).items():
            counts[name] = counts.get(name, 0) + value
    drafted, accepted = (counts[f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
    assert drafted > 10 * TRIALS
    assert 0.2 * drafted < accepted < 0.9 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", draft_workload.MUTATIONS)
def test_a_broken_rule_of_the_worker_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_workload.break_rule(name, monkeypatch, mutated)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a wrong answer, or a check within the engine
        draft_workload.trials(8 * TRIALS)
