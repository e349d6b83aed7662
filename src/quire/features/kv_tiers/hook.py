"""KVTierHook: copies blocks of this rank, and recurrent states, to slots of the staging memory, and back, before the model runs.

So a save comes after every step that wrote the block, and before the first that overwrites it; a load comes before the step
that reads it. The scheduler decides which (`gate.py`). Knows the layers' caches; does not know names or stores.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.features.kv_tiers.copies import NAME, BlockCopies, RankBlocks, part_bytes
from quire.forward_context import ForwardBatch
from quire.kvstore.record import PAGE
from quire.kvstore.staging import StagingView
from quire.ops.cpu.bindings import best
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook
from quire.worker.row_states import RowStates

KERNEL_WIDTH = 32
"""The CPU's kernels compute layers whose widths are multiples of this."""


class KVTierHook(Hook):
    """Copies blocks and states of one rank. `models`: the list of the worker, with the main model first; `states`: the recurrent states of
    the worker's rows and checkpoints."""

    name = NAME
    order = 15  # after a row has loaded a checkpoint whose place is written now

    def __init__(self, models: Sequence[Any], states: RowStates, refusal: str = ""):
        self.id, self.models, self.refusal = uuid.uuid4().hex, models, refusal
        self.states, self.first_part = states, 1 << 30  # the number of the first part of a state
        self.part_starts: list[int] = []
        self.staging: StagingView | None = None
        self.slots_SB = torch.empty(0, 0)  # bytes of a record, of all ranks
        self.starts: list[int] = []

    def use_models(self, models: Sequence[Any]) -> None:
        self.models = models

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True

    # -- at the start -----------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """A `RankBlocks` as builtins."""
        layers = self._layers()
        num_groups = 1 + max((layer.kv_group for layer in layers), default=-1)
        found = RankBlocks(
            self.id,
            [sum(part[0].nbytes for part in self._parts(g)) for g in range(num_groups)],
            self._state_bytes(),
            str([layer.state_spec() for layer in self.states.layers]),
            [type(layer.backend).__name__ for layer in layers],
            self._is_exact(layers),
            self.refusal,
        )
        return dict(msgspec.to_builtins(found))

    def attach(
        self,
        path: str,
        places: Mapping[str, tuple[int, list[int]]],
        slot_bytes: int,
        num_parts: int,
    ) -> None:
        """Use this staging memory. `places`: by rank's id, its number, and where its part of a record begins, by group.
        `num_parts`: of a recurrent state; they are the last groups."""
        rank, self.starts = places[self.id]
        self.staging = StagingView(path, rank)
        slots_SB = torch.frombuffer(self.staging.memory, dtype=torch.uint8).view(-1, slot_bytes)
        self.slots_SB = slots_SB[:, PAGE:]
        if num_parts:
            self.first_part = len(self.starts) - num_parts
            sizes = part_bytes(self._state_bytes(), num_parts)
            self.part_starts = [0, *accumulate(sizes)]

    def _state_bytes(self) -> int:
        """Of one state, if there are checkpoints."""
        has_states = self.states.num_checkpoints and self.states.storage is not None
        return self.states.checkpoint(0).nbytes if has_states else 0

    def _is_exact(self, layers: Sequence[Any]) -> bool:
        model = self.models[0]
        weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if any(p.device.type != "cpu" for p in model.parameters()) or not hasattr(model, "cfg"):
            return False
        if weights == {torch.float32}:
            return True
        if self.states.layers:
            return False
        widths = (model.cfg.hidden_size, *(layer.spec.head_dim for layer in layers))
        own = all(type(layer.backend).__name__ == "CpuAttention" for layer in layers)
        return own and best() is not None and all(width % KERNEL_WIDTH == 0 for width in widths)

    # -- each step --------------------------------------------------------------------------------
    @torch.inference_mode()
    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if (extra := plan.extras.get(NAME)) is not None:
            copies = msgspec.msgpack.decode(extra, type=BlockCopies)
            groups = {group for _, group, _ in (*copies.saves, *copies.loads)}
            parts = {group: self._parts(group) for group in groups if group < self.first_part}
            for slot, group, block in copies.saves:
                for place, part in self._places(slot, group, block, parts.get(group, ())):
                    _copy(part, place)
            for slot, group, block in copies.loads:
                for place, part in self._places(slot, group, block, parts.get(group, ())):
                    _copy(place, part)
            for (
                slot,
                step,
            ) in copies.filled:  # the step before has copied the other parts, unless it failed
                if not step or self.states.saved_in.get(slot) == step:
                    self.states.saved_in[slot] = plan.step
        if self.staging is not None:
            self.staging.acknowledge(plan.step)

    def _places(
        self, slot: int, group: int, block: int, parts: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each part of a block, or of the part of a state in checkpoint `block`: its bytes in the slot, and in the cache."""
        start = self.starts[group]
        if group >= self.first_part:
            begin, end = self.part_starts[group - self.first_part :][:2]
            if begin < end:
                yield self.slots_SB[slot, start : start + end - begin], self.states.checkpoint(block)[begin:end]  # fmt: skip
            return
        for part in parts:
            bytes_B = part[block].view(torch.uint8).view(-1)
            end = start + len(bytes_B)
            yield self.slots_SB[slot, start:end], bytes_B
            start = end

    def _layers(self) -> list[Any]:
        return [layer for model in self.models for layer in model.attention_layers()]

    def _parts(self, group: int) -> list[Tensor]:
        """The tensors of all layers of a KV group, [blocks, ...]. Of a latent cache, the values are a view of the keys."""
        layers = [layer for layer in self._layers() if layer.kv_group == group]
        return [
            part
            for layer in layers
            for part in (layer.spec.cache[:1] if layer.spec.latent else layer.spec.cache)
        ]


def _copy(source: Tensor, to: Tensor) -> None:
    """Copy bytes. On a CPU by this thread alone: torch would share 32 KB and more between its threads, which wait for each other while
    other threads read records."""
    if source.device.type == to.device.type == "cpu":
        np.copyto(to.numpy(), source.numpy())
    else:
        to.copy_(source)
