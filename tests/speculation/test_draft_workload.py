"""Draft tokens never change an answer, whatever the worker and the scheduler do meanwhile; and a broken rule is noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import draft_workload
import numpy as np
import pytest
import torch

from quire.protocol.plan import EnteredRow
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.logits_processors import ProcessorRows
from quire.worker.sampling.vllm_processors import VllmProcessorAdapter
from tests.broken_rule import broken

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


def test_every_broken_rule_is_in_the_code() -> None:
    """(Renamed variables had left three mutations without effect, and only the slow tests noticed.)"""
    for mutation in draft_workload.MUTATIONS.values():
        with broken(*mutation):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("name", draft_workload.MUTATIONS)
def test_a_broken_rule_of_the_worker_is_noticed(name: str) -> None:
    # a wrong answer, or a check within the engine
    with broken(*draft_workload.MUTATIONS[name]), pytest.raises(Exception):  # noqa: B017, PT011
        draft_workload.trials(8 * TRIALS)


class SumOfOutputs:
    """A processor with vLLM's interface, of which each call is a function of the outputs."""

    accepts_drafts = True

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: Any) -> None:
        for index, _, _, outputs in () if update is None else update.added:
            self.outputs[index] = outputs

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, outputs in self.outputs.items():
            logits[index, sum(outputs)] += 1
        return logits


def test_a_processor_for_vllm_sees_the_draft_tokens_before_each_place() -> None:
    rows, inner = RequestRows(4, 64, 1, 8), SumOfOutputs()
    adapter = VllmProcessorAdapter(inner)
    assert adapter.accepts_drafts
    for row in (1, 2):
        new = EnteredRow(row, str(row), [5, 6], 2, 0, [[]], SamplingParams())
        rows.enter(new)
        adapter.enter(new)
    rows.put_drafts(1, [3, 4])
    selected = ProcessorRows(np.arange(4), np.array([1, 1, 1, 2]), np.array([2, 3, 4, 2]), rows)
    for _ in range(2):  # nothing is left of the draft tokens
        logits_SV = adapter.apply(torch.zeros(4, 9), selected)
        assert logits_SV.argmax(1).tolist() == [0, 3, 7, 0]
        assert logits_SV.sum() == 4
    assert inner.outputs == {0: [], 1: []}
