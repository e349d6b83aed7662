"""StateHook: clears, loads and saves the recurrent states of rows around a step.

Knows rows and the places of checkpoints. Does not know tensors (`row_states.py`), or which checkpoints are worth keeping
(`features/state_checkpoints`). Imports no torch.

A state is cleared when a request takes the row, so no state of an earlier request, not even a NaN, reaches it; nor does
the half-written state of a step that failed, since the requests of that step end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch

NAME = "state_checkpoints"


class StateMoves(Struct, array_like=True):
    """What a plan's step does with checkpoints: loads before it computes, saves after it has computed."""

    loads: list[tuple[int, int, int]] = []  # row, slot of the checkpoint, step that saved it
    saves: list[tuple[int, int]] = []  # row, slot


class States(Protocol):
    """The states of rows, and copies of them in slots.

    saved_in: by slot, the step that saved it.
    """

    saved_in: dict[int, int]

    def clear(self, row: int) -> None: ...
    def load(self, row: int, slot: int) -> None: ...
    def save(self, row: int, slot: int) -> None: ...


class StateHook(Hook):
    """Runs the moves of `plan.extras`."""

    name = NAME
    order = 10

    def __init__(self, states: States):
        self.states = states
        self.saves: list[tuple[int, int]] = []

    def enter(self, new: EnteredRow) -> None:
        self.states.clear(new.row)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True  # it acts before and after the step, whichever way that runs

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        """Raises RuntimeError: the step that should have saved a checkpoint failed."""
        self.saves = []
        if (extra := plan.extras.get(NAME)) is None:
            return
        moves = msgspec.msgpack.decode(extra, type=StateMoves)
        for row, slot, step in moves.loads:
            if self.states.saved_in.get(slot) != step:
                raise RuntimeError(f"step {step}, which failed, saved no state for row {row}")
            self.states.load(row, slot)
        self.saves = moves.saves

    def after(self, plan: StepPlan) -> None:
        for row, slot in self.saves:
            self.states.save(row, slot)
            self.states.saved_in[slot] = plan.step
