"""PendingHiddenStates: the target's hidden states at positions of a row that a speculator has not computed yet.

Knows positions and states. Does not know speculators. Rows without draft tokens cost little so: a speculator computes their
positions when they get draft tokens, all at once.

Shape suffixes: n positions of a step, N positions of a row, E features of the target's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MOST_OF_ROW, MOST_OF_ALL = 512, 4096
"""Positions that wait: of a row, and of all rows together."""
CHECKED_POSITIONS = 64
"""How many more may wait before they are counted again."""
IDLE_STEPS = 128
"""After this number of steps without draft tokens a row gets no more of them, and then costs nothing."""
JOINED_STEPS = 64
"""After this number of steps a row's states are copied into one tensor: each view keeps the whole step's tensor in memory."""


States = Tensor | np.ndarray
"""As a tensor; or bf16 on the host as int16, since numpy copies a few lines in a fraction of torch's time."""


def concatenated(parts: Sequence[States], axis: int = 0) -> States:
    if any(isinstance(part, Tensor) for part in parts):
        return torch.cat([as_tensor(part) for part in parts], axis)
    return np.concatenate(parts, axis)


def address_of(states: States) -> int:
    return states.data_ptr() if isinstance(states, Tensor) else states.ctypes.data


def as_tensor(states: States) -> Tensor:
    return states if isinstance(states, Tensor) else torch.from_numpy(states).view(torch.bfloat16)


@dataclass(slots=True)
class PendingHiddenStates:
    """Of a row, up to the last that the target computed."""

    start: int = 0
    states_nE: list[States] = field(default_factory=list)  # by step
    count: int = 0
    steps: int = 0  # since the row got draft tokens
    is_lost: bool = False

    def add(self, start: int, states_nE: States) -> None:
        """What a step computed from position `start` on."""
        if self.steps >= IDLE_STEPS:
            self.lose()
            return
        if self.start + self.count != start:
            self.start, self.states_nE, self.count = start, [], 0
        self.states_nE.append(states_nE)
        self.count, self.steps = self.count + len(states_nE), self.steps + 1
        if len(self.states_nE) == JOINED_STEPS:
            self.states_nE = [concatenated(self.states_nE)]

    def take_first(self, count: int) -> States:
        """The states of the first positions, which then wait no longer."""
        states_NE = concatenated(self.states_nE)
        self.start, self.count, self.steps = self.start + count, self.count - count, 0
        self.states_nE = [states_NE[count:]] if self.count else []
        return states_NE[:count]

    def lose(self) -> None:
        """The row gets no draft tokens any more. Its keys and values lack the positions that waited."""
        self.states_nE, self.count, self.is_lost = [], 0, True


def too_many(waiting: Mapping[int, PendingHiddenStates]) -> list[int]:
    """Rows whose positions must not wait any longer: those with the most."""
    total = sum(one.count for one in waiting.values())
    largest = max((one.count for one in waiting.values()), default=0)
    if total <= MOST_OF_ALL and largest <= MOST_OF_ROW:
        return []
    found = []
    for row, one in sorted(waiting.items(), key=lambda item: -item[1].count):
        if total > MOST_OF_ALL or one.count > MOST_OF_ROW:
            found.append(row)
            total -= one.count
    return found
