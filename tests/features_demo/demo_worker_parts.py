"""The worker's parts of the demo: a hook, a logits processor, a function, a model input, and a model output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from quire.forward_context import ForwardBatch
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.worker.build import WorkerParts
from quire.worker.hooks import Hook
from quire.worker.model_input import ModelInput
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.logits_processors import Processor, ProcessorRows
from quire.worker.worker import FinishedStep


class DemoHook(Hook):
    """Reports the ids of the requests with extras that a step has; keeps the own model of the feature."""

    order = 60

    def __init__(self, name: str, place: slice):
        self.name, self.place = name, place
        self.own: list[Any] = []
        self.ids: dict[int, str] = {}
        self.numbers: list[int] = []
        self.steps = {"fast": 0, "by parts": 0}
        self.reports: list[list[str]] = []

    def use_models(self, models: Sequence[Any]) -> None:
        self.own = list(models[self.place])

    def enter(self, new: EnteredRow) -> None:
        if self.name in new.extras:
            self.ids[new.row] = new.id

    def leave(self, row: int) -> None:
        self.ids.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if plan.work:
            self.steps["fast" if batch is None else "by parts"] += 1
        if (extra := plan.extras.get(self.name)) is not None:
            self.numbers += msgspec.msgpack.decode(extra, type=list[int])
        drawn = (item.row for item in plan.work if item.samples)
        self.reports.append([self.ids[row] for row in drawn if row in self.ids])

    def report(self) -> bytes | None:
        ids = self.reports.pop(0)
        return msgspec.msgpack.encode(ids) if ids else None

    def state(self) -> dict[str, Any]:
        """What a test asks each worker for."""
        total, tokens_T = 0.0, torch.tensor([5, 6, 7])
        for model in self.own:
            if isinstance(model, nn.Module):
                with torch.inference_mode():
                    total += float(model.logits(model.embed(tokens_T)).double().abs().sum())
        return {"numbers": self.numbers, "weights": total, "models": len(self.own), **self.steps}


class DemoProcessor(Processor):
    """Bans the token in the request's extras."""

    mask_only = True
    accepts_drafts = True
    order = 70

    def __init__(self, name: str):
        self.extra_name = name
        self.banned: dict[int, int] = {}

    def enter(self, new: EnteredRow) -> bool:
        if (token := new.extras.get(self.extra_name)) is None:
            return False
        self.banned[new.row] = int(token)
        return True

    def leave(self, row: int) -> None:
        del self.banned[row]

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        for index, row in zip(selected.indices.tolist(), selected.rows.tolist(), strict=True):
            logits_SV[index, self.banned[row]] = -float("inf")
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        for index, row in zip(selected.indices.tolist(), selected.rows.tolist(), strict=True):
            word, bit = divmod(self.banned[row], 32)
            words_SW[index, word] &= ~np.uint32(1 << bit).view(np.int32)


class DemoInput(ModelInput):
    """Counts the passes of the model input that it wraps."""

    def __init__(self, inner: ModelInput):
        self.inner, self.passes = inner, 0

    @property
    def model(self) -> Any:
        return self.inner.model

    @model.setter
    def model(self, model: Any) -> None:
        self.inner.model = model

    def set_fused(self, fused: bool) -> None:
        self.inner.set_fused(fused)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return self.inner.accepts_fast_step(plan)

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.passes += 1
        return self.inner.forward(batch)


class ConstantOutput:
    """Each draw is token 7."""

    def __init__(self, model: Any, rows: RequestRows):
        self.model, self.rows = model, rows

    def enter(self, new: EnteredRow) -> None: ...
    def leave(self, row: int) -> None: ...
    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return False

    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> FinishedStep:
        for _, row, position in batch.first_draws():
            self.rows.write_tokens(row, position, [7])
        drawn = {number for number, _, _ in batch.first_draws()}
        tokens = [[7] if number in drawn else [] for number in range(len(plan.work))]
        return FinishedStep(StepResult(plan.step, tokens))


def plug_in(parts: WorkerParts, name: str) -> None:
    hook, wrapped = DemoHook(name, parts.places.get(name, slice(0))), DemoInput(parts.model_input)
    parts.hooks.append(hook)
    parts.model_input = wrapped
    parts.functions["demo_state"] = lambda: {**hook.state(), "passes": wrapped.passes}
    if parts.draws:
        parts.processors.append(DemoProcessor(name))
