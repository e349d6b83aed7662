"""Positions that wait for a speculator: their states come back in order, and idle rows lose theirs."""

from __future__ import annotations

import numpy as np
import torch

from quire.features.speculation import pending_hidden_states as module
from quire.features.speculation.pending_hidden_states import (
    PendingHiddenStates,
    too_many,
)


def states(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).bfloat16()[:, None].expand(-1, 3).contiguous()


def test_states_of_many_steps_come_back_in_order() -> None:
    """As tensors, and as the words of bf16."""
    one, at = PendingHiddenStates(), 0
    for number in range(120):
        count = 1 + number % 2
        found = states(at, count)
        one.add(at, found if number % 3 else found.view(torch.int16).numpy())
        at += count
    assert (one.start, one.count, one.steps) == (0, at, 120)
    assert len(one.states_nE) < 64
    assert torch.equal(one.take_first(100), states(0, 100))
    assert (one.start, one.count, one.steps) == (100, at - 100, 0)
    assert torch.equal(one.take_first(at - 100), states(100, at - 100))
    one.add(at, np.concatenate([states(at, 1).view(torch.int16).numpy()]))
    assert torch.equal(module.as_tensor(one.take_first(1)), states(at, 1))


def test_positions_begin_again_after_a_gap() -> None:
    one = PendingHiddenStates()
    one.add(0, states(0, 4))
    one.add(7, states(7, 2))
    assert (one.start, one.count) == (7, 2)
    assert torch.equal(one.take_first(2), states(7, 2))


def test_a_row_without_draft_tokens_for_long_keeps_no_states() -> None:
    one = PendingHiddenStates()
    for at in range(module.IDLE_STEPS + 1):
        one.add(at, states(at, 1))
        if at == 9:
            one.take_first(5)  # it got draft tokens
    assert not one.is_lost
    for at in range(module.IDLE_STEPS + 1, module.IDLE_STEPS + 11):
        one.add(at, states(at, 1))
    assert (one.count, one.states_nE, one.is_lost) == (0, [], True)


def test_the_rows_with_the_most_positions_give_way() -> None:
    waiting = {row: PendingHiddenStates() for row in range(20)}
    for row, one in waiting.items():
        one.add(0, states(0, 100 + row))
    assert too_many(waiting) == []
    waiting[3].add(100 + 3, states(0, module.MOST_OF_ROW))
    assert too_many(waiting) == [3]
    for row in range(4, 20):
        waiting[row].add(100 + row, states(0, 200))
    total = sum(one.count for one in waiting.values())
    found = too_many(waiting)
    assert found[0] == 3
    left = total - sum(waiting[row].count for row in found)
    assert left <= module.MOST_OF_ALL < left + waiting[found[-1]].count
    waiting[3].lose()
    assert (waiting[3].count, waiting[3].is_lost) == (0, True)
