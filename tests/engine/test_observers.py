"""Observers of steps: what they see, in which order, and that one that fails costs nothing but itself."""

from __future__ import annotations

import logging
import random

import pytest
from toy_device import StepFailed, ToyDevice
from workload import reference

from quire.engine.core import EngineCore
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineOutput
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler


class Notes:
    """An observer that writes down what it sees."""

    def __init__(self) -> None:
        self.plans: dict[int, StepPlan] = {}
        self.results: dict[int, StepResult | BaseException] = {}
        self.in_flight = self.most_in_flight = 0

    def launched(self, plan: StepPlan) -> None:
        assert plan.step not in self.plans
        self.plans[plan.step] = plan
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        assert step == len(self.results) + 1, "steps finish in their order"
        assert step in self.plans
        self.results[step] = result
        self.in_flight -= 1


class Failing:
    """An observer with a fault, in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def launched(self, plan: StepPlan) -> None:
        self._called("launched")

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        self._called("finished")

    def _called(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            raise RuntimeError("a fault of the observer")


def make(depth: int) -> EngineCore:
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    device = ToyDevice(groups, 101, 4, 0, random.Random(1))
    limits = SchedulerLimits(max_rows=4, max_step_tokens=16, max_length=60, depth=depth)
    return EngineCore(Scheduler(KVManager(BlockPool(101), groups, 4), limits), device, depth)


def run(core: EngineCore, count: int = 6) -> dict[str, list[EngineOutput]]:
    got: dict[str, list[EngineOutput]] = {}
    for number in range(count):
        request = EngineRequest(f"r{number}", [1, 2, number], SamplingParams(max_tokens=3 + number))
        core.executor.kin[request.id] = (None, "")
        core.inbox.put(request)
    while core.scheduler.has_requests or not got:
        for output in core.turn():
            got.setdefault(output.id, []).append(output)
    return got


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_observers_see_each_step_once_with_its_result(depth: int) -> None:
    core, notes = make(depth), Notes()
    core.observers.add(notes)
    got = run(core)
    core.settle()
    assert len(notes.plans) == len(notes.results) == core.scheduler.steps
    assert notes.most_in_flight == depth
    drawn = sum(len(t) for result in notes.results.values() for t in result.tokens)
    assert drawn >= sum(len(tokens(outputs)) for outputs in got.values())
    for step, plan in notes.plans.items():
        assert len(notes.results[step].tokens) == len(plan.work)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("where", ["launched", "finished"])
def test_an_observer_that_fails_is_dropped_and_changes_no_token(
    depth: int, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, bad, notes = make(depth), Failing(where), Notes()
    core.observers.add(bad, notes)
    with caplog.at_level(logging.WARNING, "quire"):
        got = run(core)
    assert bad.calls == 1
    assert bad not in core.observers
    assert notes in core.observers
    [line] = [record for record in caplog.records if "Failing" in record.getMessage()]
    assert "a fault of the observer" in line.getMessage()
    for number in range(6):
        request = EngineRequest(f"r{number}", [1, 2, number], SamplingParams(max_tokens=3 + number))
        assert tokens(got[request.id]) == reference(request)[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_observers_see_the_error_of_a_step(depth: int) -> None:
    core, notes = make(depth), Notes()
    core.observers.add(notes)
    core.executor.failing_steps = 1.0
    got = run(core, 2)
    core.settle()
    assert {outputs[-1].finish for outputs in got.values()} == {"error"}
    assert all(isinstance(result, StepFailed) for result in notes.results.values())
    assert len(notes.results) == len(notes.plans)


def test_observers_see_a_fatal_error() -> None:
    core, notes = make(1), Notes()
    core.observers.add(notes)
    core.executor.recoverable = ()
    core.executor.failing_steps = 1.0
    with pytest.raises(StepFailed):
        run(core, 1)
    assert isinstance(notes.results[1], StepFailed)


def test_an_observer_may_unregister_during_its_call() -> None:
    core = make(2)

    class Once(Notes):
        def launched(self, plan: StepPlan) -> None:
            super().launched(plan)
            core.observers.remove(self)

    once, notes = Once(), Notes()
    core.observers.add(once, notes)
    run(core, 2)
    assert len(once.plans) == 1
    assert len(notes.plans) > 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_step_counts_its_tokens(depth: int):
    """The sum is exact: every prompt token and every token made, once, in as many values as there were steps."""
    core = make(depth)
    got = run(core)
    made = sum(len(output.tokens) for outputs in got.values() for output in outputs)
    *counts, total = core.stats().histograms["step_tokens"]
    assert total == 3 * 6 + made == core.stats().prompt_tokens + core.stats().generation_tokens
    assert sum(counts) == core.stats().steps
    assert counts[-1] == 0
