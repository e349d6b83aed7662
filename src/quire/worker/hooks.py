"""Hook: what happens around a forward pass on one device, by features that the worker cannot name.

Knows when it is called. A hook and the gate of the same name talk through `plan.extras` and
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
        """Rows are seated; the model has not run."""

    def after(self, plan: StepPlan) -> None:
        """The model has run and tokens are being drawn."""

    def certain(self, step: int) -> dict[int, list[int]]:
        """Tokens that are sure to follow what that step drew, by row; asked once, when its result is read.

        They are not drawn: a later step computes their KV at once, as if they were a prompt's.
        """
        return {}

    def report(self) -> bytes | None:
        """What rides up in result.extras[name]; asked once a step, when its result is read."""
        return None
