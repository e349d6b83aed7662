"""Hook: what a feature does around the forward pass of a worker, without the worker knowing the feature.

Knows when it is called. A hook and the gate of the same name exchange data through `plan.extras` and
`StepResult.extras`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.protocol.plan import EnteredRow, StepPlan


class Hook:
    """The base does nothing; a feature overrides what it needs."""

    name = "hook"
    order = 50
    """The worker calls its hooks in ascending order: 0 ... 29 set up the state of the rows, which the model reads; 30 ... 69 act
    on the step; 70 ... 99 act on what it has drawn."""
    idle_until = 0
    """Of plans with smaller numbers (`plan.step`) the worker calls only `enter` and `leave`."""

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """The worker runs these models from now on, the main one first, and has not fused them yet; or, while it is asleep,
        none of them is an nn.Module."""

    def enter(self, new: EnteredRow) -> None:
        """A request took a row (again, after a preemption); called before the other methods see its plan."""

    def leave(self, row: int) -> None:
        """A row was freed."""

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """Whether this plan may run in one native call, without a batch and without the model's modules.

        False, as in the base class: the step runs by parts, and `before` gets its batch.
        """
        return False

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        """The requests are in their rows; the model has not run.

        `batch`: what the model will compute. The hook may add tensors to `batch.extras`; modules read them from
        `current_batch()`. It may replace embeddings (`batch.embeddings`) and rotary positions (`ROPE_POSITIONS`). None: the step runs on the fast path, or the plan has no work.
        """

    def after(self, plan: StepPlan) -> None:
        """The model's work is queued and so is the draw."""

    def added_tokens(self, step: int) -> dict[int, list[int]]:
        """By row, tokens that follow the token of this step without a draw; called once, when the step's result is read.

        A later step computes their KV like the KV of prompt tokens. A hook may add tokens only where each result is read before
        the next step is queued (depth 1): else steps in flight would draw at these positions.
        """
        return {}

    def report(self) -> bytes | None:
        """What goes to the gate in result.extras[name]; called once per step, when its result is read."""
        return None
