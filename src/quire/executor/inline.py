"""InlineExecutor: the worker is in this process, and `launch` runs the step.

Knows one worker. Does not know what it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import StepFailed
from quire.executor.base import FailedStep, StepFuture
from quire.protocol.plan import StepPlan

if TYPE_CHECKING:
    from quire.worker.worker import Worker


class InlineExecutor:
    """An Executor for one worker. `recoverable`: the exceptions that end only a step."""

    def __init__(
        self, worker: Worker, recoverable: tuple[type[BaseException], ...] = (StepFailed,)
    ):
        self.worker, self.recoverable = worker, recoverable

    def launch(self, plan: StepPlan) -> StepFuture:
        try:
            return self.worker.run(plan)
        except self.recoverable as error:
            return FailedStep(error)

    def call(self, name: str, *args: Any) -> list[Any]:
        return [self.worker.call(name, *args)]

    def lost(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to do: Python frees the worker with its last reference."""
