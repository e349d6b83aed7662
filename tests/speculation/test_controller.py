"""How many draft tokens the controller gives, in simulated engines: by acceptance, and by what steps and drafters cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.features.speculation.controller import TRIAL_STEPS, SpeculationController

Cost = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """Seconds of a step of a device that reads weights: up to 16 tokens take the time of one."""
    return 1.0 + max(tokens - 16, 0) / 16


def compute_bound(tokens: int) -> float:
    return 0.1 + tokens / 10


def simulated(
    cost: Cost, num_rows: int, accepted: float, *, steps: int = 4000, drafting_s: float = 0.0
) -> tuple[float, float]:
    """Speed relative to an engine without draft tokens, and draft tokens for each row and step in the last 500 steps."""
    controller, draw = SpeculationController(5), random.Random(1)
    for row in range(num_rows):
        controller.enter(row)
    drafts = dict.fromkeys(range(num_rows), 0)
    tokens, seconds, late = 0, 0.0, 0
    for step in range(steps):
        verified = sum(drafts.values())
        got = num_rows
        for row, count in drafts.items():
            if count:
                right = next((n for n in range(count) if draw.random() >= accepted), count)
                controller.learn(row, count, right)
                got += right
        limits = controller.limits(dict.fromkeys(range(num_rows), 5))
        took = cost(num_rows + verified) * draw.choice([1.0, 1.0, 1.1])
        took += max(limits.values(), default=0) * drafting_s
        controller.record(num_rows, got, verified, took, True)
        drafts = {row: limits.get(row, 0) for row in range(num_rows)}
        tokens, seconds = tokens + got, seconds + took
        late += sum(drafts.values()) * (step >= steps - 500)
    plain = num_rows / (cost(num_rows) * 31 / 30)
    return tokens / seconds / plain, late / 500 / num_rows


def test_right_draft_tokens_pay_where_steps_read_weights() -> None:
    speed, drafts = simulated(memory_bound, 1, 0.9)
    assert speed > 2.5
    assert drafts > 4


def test_trials_without_draft_tokens_are_short_where_draft_tokens_are_fast() -> None:
    """Of 400 steps after the first window, at most 2 % have none."""
    controller = SpeculationController(5)
    controller.enter(0)
    given = []
    for _ in range(700):
        count = controller.limits({0: 5}).get(0, 0)
        given.append(count)
        if count:
            controller.learn(0, count, count)
        controller.record(1, 1 + count, count, 1.0, True)
    assert given[250:650].count(0) <= 8
    assert given[250:].count(0) > 0


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 32])
def test_wrong_draft_tokens_cost_little(cost: Cost, num_rows: int) -> None:
    speed, drafts = simulated(cost, num_rows, 0.0)
    assert speed > 0.96
    assert drafts < 0.3


def test_under_load_rows_get_draft_tokens_only_if_they_pay() -> None:
    speed, drafts = simulated(compute_bound, 32, 0.6)
    assert speed > 0.96
    assert drafts < 0.2
    assert simulated(memory_bound, 4, 0.6)[0] > 1.3


def test_a_drafter_that_takes_long_is_switched_off() -> None:
    assert simulated(memory_bound, 1, 0.8, drafting_s=0.05)[0] > 1.8
    speed, drafts = simulated(memory_bound, 1, 0.8, drafting_s=5.0)
    assert speed > 0.85  # the first window and the trials
    assert drafts < 0.3


def test_rows_whose_draft_tokens_are_wrong_get_few_and_come_back() -> None:
    """Row 0 copies, row 1 does not, and then the reverse."""
    controller = SpeculationController(4)
    for row in (0, 1):
        controller.enter(row)
    given: list[dict[int, int]] = []
    for step in range(400):
        limits = controller.limits({0: 4, 1: 4})
        for row, count in limits.items():
            right = (row == 0) == (step < 200)
            controller.learn(row, count, count if right else 0)
        controller.record(2, 2, sum(limits.values()), 1.0 if limits else 0.9, True)
        if limits:
            given.append(limits)
    half = len(given) // 2
    assert given[half - 10].get(0) == 4
    assert given[half - 10].get(1, 0) <= 1
    assert given[-10].get(1) == 4
    assert given[-10].get(0, 0) <= 1


def test_an_interruption_does_not_raise_the_price_of_draft_tokens() -> None:
    controller = SpeculationController(3)
    controller.enter(0)
    for step in range(600):
        limits = controller.limits({0: 3})
        if limits:
            controller.learn(0, limits[0], limits[0])
        seconds = 1000.0 if step in (150, 300) else 1.0
        controller.record(1, 1 + sum(limits.values()), sum(limits.values()), seconds, True)
    given = [controller.limits({0: 3}) for _ in range(TRIAL_STEPS + 1)]
    assert {0: 3} in given


@pytest.mark.parametrize("paused", [64, 160, 480])
def test_an_interruption_of_a_step_with_prompt_tokens_does_not_end_draft_tokens(
    paused: int,
) -> None:
    """The engine is paused while a request enters."""
    controller = SpeculationController(3)
    controller.enter(0)
    without = 0
    for step in range(1000):
        limits = controller.limits({0: 3})
        without += not limits and step >= 64
        if limits:
            controller.learn(0, limits[0], limits[0])
        seconds, decodes = (4.0, False) if step % 32 == 0 else (1.0, True)
        seconds *= 1000 if step == paused else 1
        controller.record(1, 1 + sum(limits.values()), sum(limits.values()), seconds, decodes)
    assert without <= 20


def test_a_fixed_number_stays() -> None:
    controller = SpeculationController(3, fixed=True)
    controller.enter(0)
    for _ in range(400):
        controller.learn(0, 3, 0)
        controller.record(1, 1, 3, 9.0, True)
    assert controller.limits({0: 9, 1: 2, 2: 0}) == {0: 3, 1: 2}
    assert controller.speculates(1)
    assert not controller.sleeps(1)


def test_a_drafter_sleeps_through_long_windows_and_wakes_for_trials() -> None:
    controller = SpeculationController(3)
    controller.enter(0)
    slept = tried = 0
    for _ in range(3000):
        if controller.sleeps(1):
            controller.skip(1, 16)
            slept += 16
        limits = controller.limits({0: 3})
        if limits:
            tried += 1
            controller.learn(0, limits[0], 0)
        controller.record(1, 1, sum(limits.values()), 2.0 if limits else 1.0, True)
    assert slept > 2000
    assert tried > TRIAL_STEPS
