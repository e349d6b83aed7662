"""Hook: what a feature does around the forward pass of a worker, without the worker knowing the feature.

Knows when it is called. A hook and the gate of the same name exchange data through `plan.extras` and
`StepResult.extras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan


class Hook:
    """The base does nothing; a feature overrides what it needs."""

    name = "hook"

    def before(self, plan: StepPlan) -> None:
        """The requests are in their rows; the model has not run."""

    def after(self, plan: StepPlan) -> None:
        """The model's work is queued and so is the draw."""

    def certain(self, step: int) -> dict[int, list[int]]:
        """By row, the forced tokens that follow this step's token; called once, when the step's result is read.

        They are not drawn: a later step computes their KV like that of prompt tokens.
        """
        return {}

    def report(self) -> bytes | None:
        """What goes to the gate in result.extras[name]; called once per step, when its result is read."""
        return None
