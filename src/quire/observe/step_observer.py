"""StepObserver: what sees the steps of an engine, without a part in them.

Knows plans and results. `EngineCore` calls its observers; `engine/build.py` says which there are: the flight
recorder, the watchdog, the costs of steps (`mfu.py`), the inspector.
"""

from __future__ import annotations

from typing import Protocol

from quire.logging import get_logger
from quire.protocol.plan import StepPlan, StepResult

log = get_logger(__name__)


class StepObserver(Protocol):
    """Called in the thread that runs the engine's steps. It changes neither plan nor result."""

    def launched(self, plan: StepPlan) -> None:
        """A step is about to be launched: it runs while the next one may be planned."""

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        """A launched step has its result, or has failed. Steps finish in the order in which they were launched."""


class StepObservers:
    """The observers of one engine. One that raises is dropped, with one line in the log; the step goes on."""

    def __init__(self) -> None:
        self._observers: tuple[StepObserver, ...] = ()

    def add(self, *observers: StepObserver) -> None:
        self._observers += observers

    def remove(self, observer: StepObserver) -> None:
        self._observers = tuple(one for one in self._observers if one is not observer)

    def __contains__(self, observer: StepObserver) -> bool:
        return any(one is observer for one in self._observers)

    def launched(self, plan: StepPlan) -> None:
        for observer in self._observers:
            try:
                observer.launched(plan)
            except Exception as error:
                self._drop(observer, error)

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        for observer in self._observers:
            try:
                observer.finished(step, result)
            except Exception as error:
                self._drop(observer, error)

    def _drop(self, observer: StepObserver, error: Exception) -> None:
        self.remove(observer)
        log.warning(
            "%s failed and observes no more steps: %s: %s", type(observer).__name__, type(error).__name__, error,
            exc_info=None if isinstance(error, OSError) else error,
        )  # fmt: skip
