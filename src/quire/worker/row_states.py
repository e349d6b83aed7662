"""RowStates: the recurrent states of all rows, and checkpoints of states, as one tensor.

Knows layers with a state, rows and bytes. Does not know how a layer computes. The state of a row is one run of bytes, so
that clearing or copying it is one operation, whatever the number of layers:

    row 0           | layer 0: recurrence, convolution | layer 1: recurrence, convolution | ...
    row 1           | ...
    row max_rows    the null row: padding of captured steps writes there
    checkpoint 0    | ...
    draft tokens    | of row 0, after its known tokens; after one draft token; ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.state import StateLayer
from quire.platforms.memory import lazy_zeros


class RowStates:
    """The states of up to `max_rows` requests, copies of `num_checkpoints` of them, and `num_drafts` more for each row, in the
    layers of `allocate`.

    Attributes:
        storage: [max_rows * (1 + num_drafts) + 1 + num_checkpoints, bytes of one request's state], uint8; None while it is not allocated.
        saved_in: by checkpoint, the step that wrote it.
    """

    def __init__(self, max_rows: int, num_checkpoints: int = 0, num_drafts: int = 0):
        self.max_rows, self.num_checkpoints = max_rows, num_checkpoints
        self.num_drafts = num_drafts
        self.saved_in: dict[int, int] = {}
        self.storage: Tensor | None = None
        self.layers: list[StateLayer] = []

    def allocate(self, layers: Sequence[StateLayer], device: torch.device | str = "cpu") -> None:
        """Allocate zeroed states and give each layer its part. On the CPU they use memory once they are written."""
        self.layers = list(layers)
        specs = [layer.state_spec() for layer in layers]
        num_bytes = sum(spec.num_bytes for spec in specs)
        if not num_bytes:
            return
        entries = self.kept_entry(self.max_rows, 0)
        self.storage = lazy_zeros((entries, num_bytes), torch.uint8, device)
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

    def load(self, row: int, slot: int) -> None:
        """Let the row continue from a checkpoint."""
        if self.storage is not None:
            self.storage[row].copy_(self.storage[self.max_rows + 1 + slot])

    def save(self, row: int, slot: int) -> None:
        """Make the row's state the checkpoint in this slot."""
        if self.storage is not None:
            self.storage[self.max_rows + 1 + slot].copy_(self.storage[row])

    def checkpoint(self, slot: int) -> Tensor:
        """Its bytes, uint8. Raises RuntimeError: states are not allocated."""
        if self.storage is None:
            raise RuntimeError("recurrent states are not allocated")
        return self.storage[self.max_rows + 1 + slot]

    def kept_entry(self, row: int, number: int) -> int:
        """The entry that keeps a row's state after its known tokens and `number` draft tokens."""
        return self.max_rows + 1 + self.num_checkpoints + row * self.num_drafts + number

    def take_back(self, row: int, number: int) -> None:
        """Let the row continue after `number` draft tokens of the last step."""
        if self.storage is not None:
            self.storage[row].copy_(self.storage[self.kept_entry(row, number)])
