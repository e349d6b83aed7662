"""Requests go on after the death of their engine, and the one that kills is found: random workloads, and their mutations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import deaths
import pytest

from quire.features.resumed_requests.gate import COUNTER, ResumedRequestsGate
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.request import Request
from tests.broken_rule import broken

UNFINISHED, CLIENT = "quire.engine.unfinished_request", "quire.engine.process_client"
GATE, SUSPECTS = "quire.features.resumed_requests.gate", "quire.engine.poison_requests"
RECORDER = "quire.engine.flight_recorder"

# name -> the arguments of `broken`
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "the answer becomes a part of the prompt": (UNFINISHED, "UnfinishedRequest.go_on", "request.prompt_length", "len(tokens)"),
    "tokens are forgotten": (UNFINISHED, "UnfinishedRequest.go_on", "[*request.tokens, *self.tokens]", "[*request.tokens]"),
    "tokens are repeated at the second death": (UNFINISHED, "UnfinishedRequest.go_on", "self.tokens, self.has_started = ANY", "self.has_started = False"),
    "no request is on trial": (UNFINISHED, "UnfinishedRequest.go_on", "max(num_computed, len(tokens)) + 1", "0"),
    "a trial ends before the step of the death": (UNFINISHED, "UnfinishedRequest.go_on", "max(num_computed, len(tokens)) + 1", "len(tokens)"),
    "all are on trial at once": (GATE, "ResumedRequestsGate.ready", "self.on_trial is not None", "False"),
    "later requests overtake": (GATE, "ResumedRequestsGate.ready", "return not self._holds_rest", "return self.on_trial is None or not request.is_on_trial"),
    "nobody is acquitted": (SUSPECTS, "Suspects.completed", "self._deaths.pop(ANY, None) is not None", "False"),
    "the tokens of the last step are not counted": (RECORDER, "Recording.lengths", "found[id] += len(tokens) + len(added) or 1", "pass"),
}  # fmt: skip
TRIALS = 100


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_outputs_equal_the_reference_and_only_the_guilty_end() -> None:
    worlds = [deaths.trial(seed) for seed in range(40)]
    assert sum(world.resumed for world in worlds) > 30
    assert any(world.ends[id].finish == "error" for world in worlds for id in world.killers)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    with broken(*MUTATIONS[name]):
        for seed in range(TRIALS):
            try:
                deaths.trial(seed)
            except Exception:
                return
    raise AssertionError(f"{TRIALS} random workloads did not notice")


def test_the_count_of_resumed_requests_outlives_the_process(tmp_path: Path) -> None:
    """Else two deaths between two scrapes of the metrics look like one."""
    file = tmp_path / "count"
    for number in range(1, 4):
        gate = ResumedRequestsGate({COUNTER: 0.0})
        gate.count_on(file)
        given = EngineRequest(f"x{number}", [3, 4], SamplingParams(max_tokens=2), trial_length=3)
        gate.enter(Request.of(given, number, b"", by_priority=False))
        assert gate.counts[COUNTER] == number
    file.write_text("broken")
    gate.count_on(file)
    assert gate.counts[COUNTER] == 3
