"""The worker's part of `host_copy_feature.py`: copies blocks of all layers to the host and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from host_copy_feature import Copies
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook


class HostCopyHook(Hook):
    """Copies before the model runs: after all earlier steps, and before any step that reads or overwrites the blocks."""

    order = 20

    def __init__(self, name: str, models: Sequence[Any]):
        self.name, self.models = name, models
        self.copies: dict[tuple[int, bytes], list[Tensor]] = {}
        self.reports: list[list[int]] = []

    def use_models(self, models: Sequence[Any]) -> None:
        self.models = models

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        extra = plan.extras.get(self.name)
        copies = msgspec.msgpack.decode(extra, type=Copies) if extra else Copies()
        for _, blocks in copies.saves:
            for group, block, hash in blocks:
                parts = [part[block].clone() for part in self._parts(group)]
                self.copies[group, hash] = parts
        for _, blocks in copies.loads:
            for group, block, hash in blocks:
                for part, kept in zip(self._parts(group), self.copies[group, hash], strict=True):
                    part[block] = kept
        self.reports.append([number for number, _ in [*copies.saves, *copies.loads]])

    def _parts(self, group: int) -> list[Tensor]:
        """The tensors of all layers of a KV group, [blocks, ...]."""
        layers = [layer for model in self.models for layer in model.attention_layers()]
        return [part for layer in layers if layer.kv_group == group for part in layer.spec.cache]

    def report(self) -> bytes | None:
        numbers = self.reports.pop(0)
        return msgspec.msgpack.encode(numbers) if numbers else None
