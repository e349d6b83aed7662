"""ModelRunner: runs a model on rows. The worker is the main model's; a draft model has one of its own.

Knows the order of the parts, and the fast path that may take their place. Does not know hooks, nor how a row gets its tokens.

    rows -> batch -> model input -> model output

The fast path runs batch, model input and model output in one call, if all of them accept it for this plan. What does not
answer is taken to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from quire.forward_context import ForwardBatch, forward_context
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.worker.input_batch import InputBatchBuilder
from quire.worker.model_input import ModelInput
from quire.worker.request_rows import RequestRows

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.base import LanguageModel
    from quire.native.step import NativeStep


class QueuedStep(Protocol):
    """A step that is queued on the device."""

    def result(self) -> StepResult: ...


class ModelOutput(Protocol):
    """Turns the model's hidden states into tokens; the sampler is one."""

    model: LanguageModel

    def enter(self, new: EnteredRow) -> None: ...
    def leave(self, row: int) -> None: ...
    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> QueuedStep: ...
    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether the fast path gives the tokens that `finish` would give."""
        return False


def _refuses(plan: StepPlan) -> bool:
    return False


class ModelRunner:
    """The parts of a step of one model.

    Args:
        rows: state by row; `batcher` defaults to one over it.
        fast_step: the fast path for some plans, if there is one.
    """

    def __init__(
        self,
        model_input: ModelInput,
        model_output: Any,
        rows: RequestRows,
        batcher: InputBatchBuilder | None = None,
        fast_step: NativeStep | None = None,
    ):
        self.model_input, self.model_output, self.rows = model_input, model_output, rows
        self.batcher, self.fast_step = batcher or InputBatchBuilder(rows), fast_step

    @property
    def model(self) -> Any:
        return self.model_input.model

    def use_model(self, model: LanguageModel) -> None:
        """Run this model from now on. Its layers are not fused yet."""
        self.model_input.model = self.model_output.model = model

    def set_fused(self, fused: bool) -> None:
        """The worker has fused the layers of all models, or has undone that: the fast path has the model, or no model."""

    def accepts_fast_step(self, plan: StepPlan, hooks: Iterable[object] = ()) -> bool:
        """Whether the fast path may run this plan, as its parts and these hooks say. It changes nothing."""
        parts = (self.fast_step, self.model, self.model_input, self.model_output, *hooks)
        answers = (getattr(part, "accepts_fast_step", _refuses)(plan) for part in parts)
        return all(answers)

    def forward(self, plan: StepPlan, batch: ForwardBatch) -> QueuedStep:
        """Run the model on the plan's batch, and queue its output."""
        with forward_context(batch):
            hidden_TD = self.model_input.forward(batch)
        queued: QueuedStep = self.model_output.finish(plan, batch, hidden_TD)
        return queued
