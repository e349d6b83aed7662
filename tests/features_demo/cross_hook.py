"""The worker's part of `cross_feature.py`: runs the encoder for rows whose keys and values are to be written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from quire.forward_context import ForwardBatch
from quire.protocol.plan import EnteredRow, StepPlan
from quire.worker.hooks import Hook


class SourceHook(Hook):
    order = 20

    def __init__(self, name: str, models: Sequence[Any]):
        self.name, self.models = name, models
        self.sources: dict[int, array[int]] = {}
        self.num_encoded = 0  # requests

    def use_models(self, models: Sequence[Any]) -> None:
        self.models = models

    def enter(self, new: EnteredRow) -> None:
        self.sources[new.row] = array("i", new.extras[self.name])

    def leave(self, row: int) -> None:
        self.sources.pop(row, None)

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None or batch.encoder is None or not batch.encoder.new_rows:
            return
        rows = [plan.work[item].row for item in batch.encoder.new_rows]
        ids = [torch.tensor(self.sources[row].tolist()) for row in rows]
        batch.encoder.states_SD = torch.cat([self.models[0].encoder(ids_S) for ids_S in ids])
        self.num_encoded += len(rows)
