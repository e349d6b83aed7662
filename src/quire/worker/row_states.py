"""RowStates: the recurrent states of all rows as one tensor, and the hook that clears a row's state.

Knows layers with a state, rows and bytes. Does not know how a layer computes. The state of a row is one run of bytes, so
that clearing or copying it is one operation, whatever the number of layers:

    row 0           | layer 0: recurrence, convolution | layer 1: recurrence, convolution | ...
    row 1           | ...
    row max_rows    the null row: padding of captured steps writes there

A state is cleared when a request takes the row, so no state of an earlier request, not even a NaN, reaches it; nor does
the half-written state of a step that failed, since the requests of that step end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.state import StateLayer
from quire.platforms.memory import lazy_zeros
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook


class RowStates(Hook):
    """The states of up to `max_rows` requests, in the layers of `allocate`.

    Attributes:
        storage: [max_rows + 1, bytes of one request's state], uint8; None while it is not allocated.
    """

    name = "states"

    def __init__(self, max_rows: int):
        self.max_rows = max_rows
        self.storage: Tensor | None = None
        self.layers: list[StateLayer] = []

    def allocate(self, layers: Sequence[StateLayer], device: torch.device | str = "cpu") -> None:
        """Allocate zeroed states and give each layer its part. On the CPU they use memory once they are written."""
        self.layers = list(layers)
        specs = [layer.state_spec() for layer in layers]
        num_bytes = sum(spec.num_bytes for spec in specs)
        if not num_bytes:
            return
        self.storage = lazy_zeros((self.max_rows + 1, num_bytes), torch.uint8, device)
        start = 0
        for layer, spec in zip(layers, specs, strict=True):
            parts = []
            sizes = zip(spec.shapes, spec.dtypes, spec.part_bytes, strict=True)
            for shape, dtype, padded in sizes:
                kind: torch.dtype = getattr(torch, dtype)
                flat = self.storage[:, start : start + padded].view(kind)
                parts.append(flat[:, : torch.Size(shape).numel()].view(-1, *shape))
                start += padded
            layer.bind_state(tuple(parts))

    def drop(self) -> None:
        """Forget the states, so that their memory can be freed."""
        for layer in self.layers:
            layer.drop_state()
        self.storage, self.layers = None, []

    @property
    def tensors(self) -> list[Tensor]:
        """The allocated tensors."""
        return [] if self.storage is None else [self.storage]

    def clear(self, row: int) -> None:
        """Let the row start from zeros."""
        if self.storage is not None:
            self.storage[row].zero_()

    def enter(self, new: EnteredRow) -> None:
        self.clear(new.row)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True  # it acts before the step, whichever way that runs
