"""Where experts are: the first placement, copies of busy experts, and loads that become even."""

from __future__ import annotations

import random

import pytest

from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import ConfigError
from quire.parallel.expert_placement import (
    ExpertOptions,
    Placement,
    balanced,
    balancedness,
    load_of_ranks,
    packed,
    placement,
    replicas,
)

WHOLE = ExpertOptions(whole=True)


def test_the_first_ranks_have_one_more() -> None:
    assert placement(5, 2, WHOLE) == ((0, 1, 2), (3, 4))
    assert placement(5, 2, WHOLE._replace(round_robin=True)) == ((0, 2, 4), (1, 3))
    assert placement(7, 3, WHOLE) == ((0, 1, 2), (3, 4), (5, 6))


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize("copies", [2, 4, 8])
def test_copies_fill_the_seats(round_robin: bool, copies: int) -> None:
    found = placement(8, 2, ExpertOptions(True, round_robin, copies, True))
    assert [len(seats) for seats in found] == [(8 + copies) // 2] * 2
    assert all(len(set(seats)) == len(seats) for seats in found)
    assert {e for seats in found for e in seats} == set(range(8))


@pytest.mark.parametrize(
    ("experts", "ranks", "options", "says"),
    [
        (3, 4, WHOLE, "3 experts cannot be placed on 4 ranks; use --tensor-parallel-size 3"),
        (6, 8, WHOLE._replace(engines=2), "6 experts cannot be placed on 8 ranks; use --tensor-parallel-size 3"),
        (8, 3, ExpertOptions(True, moves=True), "8 experts and 0 redundant .* use num_redundant_experts=1"),
        (8, 2, ExpertOptions(True, copies=10, moves=True), "num_redundant_experts=10 gives .* use at most 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused(
    experts: int, ranks: int, options: ExpertOptions, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        placement(experts, ranks, options)


def test_the_busiest_seat_is_copied() -> None:
    assert replicas([10, 1, 6, 1], 7) == [3, 1, 2, 1]


def test_packs_are_even_and_have_one_length() -> None:
    found = packed([9, 1, 8, 2, 7, 3], 3)
    assert [sum((9, 1, 8, 2, 7, 3)[i] for i in pack) for pack in found] == [10, 10, 10]


def check(found: Placement, before: Placement, experts: int) -> None:
    assert [len(seats) for seats in found] == [len(seats) for seats in before]
    assert {e for seats in found for e in seats} == set(range(experts))


def test_loads_become_even() -> None:
    """Random loads of which some are large: never worse, and near even with copies."""
    draw = random.Random(1)
    for copies in (0, 4, 12):
        before = placement(20, 4, ExpertOptions(True, False, copies, True))
        for _ in range(20):
            loads = [draw.paretovariate(1.2) for _ in range(20)]
            found = balanced(loads, before)
            check(found, before, 20)
            now, then = (balancedness([load_of_ranks(loads, p)]) for p in (found, before))
            assert now >= then - 1e-9
            assert now > (0.8 if copies == 12 else 0)
            assert balanced(loads, found) == found


def test_seats_keep_their_experts() -> None:
    before = placement(8, 4, WHOLE)
    assert balanced([5] * 8, before) == before
    busy = balanced([9, 9, 1, 1], ((0, 1), (2, 3)))
    assert sorted(map(sorted, busy)) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert busy[0][0] == 0 or busy[0][1] == 1  # one of both stays where it is


def test_groups_stay_on_one_machine() -> None:
    loads = [8, 7, 1, 1, 6, 5, 2, 1]  # four groups of two
    before = placement(8, 4, WHOLE)
    found = balanced(loads, before, nodes=2, groups=4)
    check(found, before, 8)
    machines = [{e // 2 for seats in found[at : at + 2] for e in seats} for at in (0, 2)]
    assert not machines[0] & machines[1]
    assert abs(sum(loads[e] for seats in found[:2] for e in seats) - sum(loads) / 2) <= 2


def test_balancedness() -> None:
    assert balancedness([[4, 4], [2, 6]]) == (4 + 4) / (4 + 6)
    assert balancedness([[0, 0]]) == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_eplb": True, "tensor_parallel_size": 2}, "enable_expert_parallel is off"),
        ({"enable_eplb": True, "enable_expert_parallel": True}, "tensor_parallel_size=1"),
        ({"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts=2 without enable_eplb"),
        ({"eplb_config": {"windows": 2}}, "eplb_config: .*windows"),
        ({"eplb_config": {"step_interval": 0}}, "eplb_config: step_interval must be a whole number of at least 1"),
        ({"eplb_config": {"policy": "swift"}}, "eplb_config.policy='swift': choose default"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ExpertOptions.of(ParallelConfig(**options))


def test_options_of_a_configuration() -> None:
    config = ParallelConfig(
        tensor_parallel_size=2, enable_expert_parallel=True, expert_placement_strategy="round_robin", enable_eplb=True,
        eplb_config={"num_redundant_experts": 2, "use_async": True},
    )  # fmt: skip
    assert ExpertOptions.of(config) == ExpertOptions(True, True, 2, True)
