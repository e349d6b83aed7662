"""Executor: sends plans to the workers and returns their results.

Knows the interface between the engine and its workers. Does not know in which process a worker runs: see
`inline.py` and `rank_process.py`. No torch here.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.protocol.plan import StepPlan, StepResult


class StepFuture(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
            one of `Executor.recoverable`: the step failed; its requests must end, others may go on.
            anything else: the state of the workers is unknown, and the engine must stop.
        """


class Executor(Protocol):
    """Runs plans on every worker, in the order in which they are launched."""

    recoverable: tuple[type[BaseException], ...]
    """The exceptions of `StepFuture.result` after which the engine may go on."""

    def launch(self, plan: StepPlan) -> StepFuture:
        """Start a step; several may be in flight. If it fails, `StepFuture.result` raises, not this method."""

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a named function of the workers, in order with the steps; one result for each worker.

        Raises:
            QuireError, ValueError: a worker has no such function, or the function failed.
        """

    def lost(self) -> str:
        """Which process of the workers has ended, and how; "" if none has. Any thread may ask."""

    def close(self) -> None:
        """Stop the workers. May be called twice."""


class FailedStep:
    """The future of a step whose launch failed."""

    def __init__(self, error: BaseException):
        self._error = error

    def result(self) -> StepResult:
        raise self._error
