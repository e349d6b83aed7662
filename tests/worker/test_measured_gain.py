"""Turns with draft tokens and without: the faster way gets nearly all steps, however they are measured."""

from __future__ import annotations

import random
from collections.abc import Callable

from quire.features.speculation.measured_gain import MeasuredGain

Speed = Callable[[int], float]  # with draft tokens, by step; 1: as without


def tried(speed: Speed, rows: int = 4, steps: int = 20_000, *, noise: float = 0.3) -> list[bool]:
    """For each step, whether it had draft tokens."""
    gain, draw, found = MeasuredGain(), random.Random(3), []
    for step in range(steps):
        found.append(gain.turn(rows)[0])
        tokens = rows * (speed(step) if found[-1] else 1.0)
        gain.spent(rows, 1, tokens, draw.uniform(1 - noise, 1 + noise))
    return found


def test_nearly_all_steps_go_the_faster_way() -> None:
    for speed, least in {0.8: 0.0, 0.95: 0.0, 1.1: 0.97, 1.5: 0.985, 3.0: 0.985}.items():
        for rows in (1, 8, 200):
            share = sum(tried(lambda step, speed=speed: speed, rows)[1000:]) / 19_000
            assert least <= share <= least + 0.03, (speed, rows, share)


def test_a_change_is_noticed() -> None:
    found = tried(lambda step: 0.8 if step < 10_000 else 1.3, steps=40_000)
    assert sum(found[5_000:10_000]) < 300
    assert sum(found[35_000:]) > 4_500


def test_each_load_has_its_own_turns() -> None:
    gain = MeasuredGain()
    for _ in range(2_000):
        for rows, speed in ((1, 2.0), (32, 0.5)):
            tries = gain.turn(rows)[0]
            gain.spent(rows, 1, rows * (speed if tries else 1.0), 1.0)
    assert (gain.turn(1), gain.turn(32)) == ((True, False), (False, False))


def test_a_turn_is_short_while_the_other_way_may_be_better() -> None:
    gain, seen = MeasuredGain(), []
    for _ in range(9_000):
        if not seen or seen[-1] != gain.turn(1):
            seen.append(gain.turn(1))
        gain.spent(1, 1, 2.0 if gain.turn(1)[0] else 1.0, 1.0)
    assert seen[:4] == [(True, True), (False, True), (True, True), (False, True)]
    assert seen[4:7] == [(True, False), (False, True), (True, False)]
