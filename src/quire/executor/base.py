"""Executor: plans go to the workers, results come back.

Knows the four things that an engine asks of its workers. Does not know where they live: see `inline.py` and
`process.py`. No torch here.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.protocol.plan import StepPlan, StepResult


class StepFuture(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
            one of `Executor.recoverable`: the step failed; its requests must end, others may go on.
            anything else: nothing can be trusted any more.
        """


class Executor(Protocol):
    """Runs plans on every worker, in the order in which they are launched."""

    recoverable: tuple[type[BaseException], ...]
    """What `StepFuture.result` may raise without the engine having to stop."""

    def launch(self, plan: StepPlan) -> StepFuture:
        """Start a step; several may be in flight. Its failure shows in `StepFuture.result`, not here."""

    def call(self, name: str, *args: Any) -> list[Any]:
        """A named function of the workers, in order with the steps: one answer a worker.

        Raises:
            QuireError, ValueError: a worker has no such function, or it failed there.
        """

    def close(self) -> None:
        """Let the workers go. May be called twice."""


class FailedStep:
    """The pending result of a step that could not even be launched."""

    def __init__(self, error: BaseException):
        self._error = error

    def result(self) -> StepResult:
        raise self._error
