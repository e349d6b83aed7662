"""The watchdog: the limit follows the work, and time while the process was suspended does not count."""

from __future__ import annotations

import itertools

from quire.processes.watchdog import FACTOR, FLOOR_S, Watchdog
from quire.protocol.plan import StepPlan, StepResult, WorkItem

NUMBERS = itertools.count(1)


def step(pulse: Watchdog, tokens: int, seconds: float, error: Exception | None = None) -> None:
    """A step from its launch to its end."""
    plan = StepPlan(next(NUMBERS), [], [WorkItem(0, tokens)], [])
    pulse.launched(plan)
    pulse.clock.now += seconds  # type: ignore[attr-defined]
    pulse.finished(plan.step, error or StepResult(plan.step, [[1]]))


def launched(pulse: Watchdog, tokens: int) -> None:
    pulse.launched(StepPlan(next(NUMBERS), [], [WorkItem(0, tokens)], []))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_measurements_the_initial_bound_applies() -> None:
    clock = Clock()
    pulse = Watchdog(300.0, clock)
    assert (pulse.beat().busy, pulse.beat().allowed) == (0.0, 300.0)
    with pulse.working():
        clock.now += 7
        assert pulse.beat().busy == 7
    assert pulse.beat().busy == 0


def test_a_large_prefill_on_a_slow_machine_is_no_hang() -> None:
    clock = Clock()
    pulse = Watchdog(300.0, clock)
    for _ in range(5):
        step(pulse, 100, 5.0)  # 50 ms a token
    launched(pulse, 4_000)
    assert pulse.beat().allowed == FLOOR_S + FACTOR * 0.05 * 4_000
    launched(pulse, 1)
    assert pulse.beat().allowed < FLOOR_S + 1


def test_a_failed_step_measures_nothing() -> None:
    pulse = Watchdog(300.0, Clock())
    step(pulse, 1, 50.0, ValueError("failed"))
    assert (pulse.steps, pulse.rate) == (0, None)


def test_one_slow_step_is_remembered_for_a_while() -> None:
    pulse = Watchdog(300.0, Clock())
    step(pulse, 1, 1.0)
    step(pulse, 1, 0.01)
    launched(pulse, 1)
    assert pulse.beat().allowed > FLOOR_S + FACTOR * 0.8
    for _ in range(100):
        step(pulse, 1, 0.01)
    assert pulse.beat().allowed < FLOOR_S + FACTOR * 0.02


def test_suspended_time_does_not_count() -> None:
    clock = Clock()
    pulse = Watchdog(300.0, clock)
    with pulse.working():
        clock.now += 1
        pulse.slept(0.5)  # a normal sleep
        assert pulse.beat().busy == 1
        clock.now += 3600
        pulse.slept(3600.0)
        assert pulse.beat().busy == 1
    pulse.slept(3600.0)  # nothing runs: nothing to correct
    assert pulse.beat().busy == 0


def test_a_function_of_the_engine_must_come_to_an_end_too() -> None:
    """Regression: no request is served while it runs, and it had no time limit."""
    clock = Clock()
    pulse = Watchdog(300.0, clock)
    step(pulse, 1, 0.01)
    told = []

    def load(part: str) -> str:
        clock.now += 601
        told.append(pulse.beat())
        return part.upper()

    assert pulse.bound(load, 600.0)("weights") == "WEIGHTS"
    assert (told[0].busy, told[0].allowed) == (601, 600)
    with pulse.working():  # a step has its own limit again
        assert pulse.beat().allowed < 600
    assert pulse.beat().busy == 0
