"""Pulse: signs of life of a process that works for another, and how long its present step may take.

Knows a clock, a cost and a way to send. Does not know what a step is made of. The bound follows the work: a long
prefill on a slow machine is not a hang. Before anything was measured the bound is `first`.

    allowed = FLOOR + FACTOR * (seconds a token took lately) * (tokens of this step)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from quire.protocol.output import Heartbeat

if TYPE_CHECKING:
    from quire.executor.base import Executor, StepFuture
    from quire.protocol.plan import StepPlan

BEAT_EVERY_S = 0.5
ASLEEP_S = 2.0
FLOOR_S = 20.0
FACTOR = 10.0
FORGET = 0.9  # of the old rate, at each step


class Watchdog:
    """`with pulse.working(): ...` around everything that must come to an end."""

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic):
        self.first, self.clock = first, clock
        self.rate: float | None = None  # seconds a token
        self.steps = 0
        self._since: float | None = None
        self._tokens = 0
        self._limit: float | None = None

    @contextmanager
    def working(self, limit: float | None = None) -> Iterator[None]:
        """`limit`: seconds that it may take, for what is no step."""
        self._since, self._limit = self.clock(), limit
        try:
            yield
        finally:
            self._since = None

    def bound(self, function: Callable[..., Any], limit: float) -> Callable[..., Any]:
        """The same, as work that must come to an end."""

        @wraps(function)
        def working(*args: Any) -> Any:
            with self.working(limit):
                return function(*args)

        return working

    def launched(self, tokens: int) -> None:
        """The work at hand is a step of so many tokens."""
        self._tokens = tokens

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens came to its end."""
        self.steps += 1
        rate = seconds / max(tokens, 1)
        self.rate = rate if self.rate is None else max(rate, FORGET * self.rate)

    def slept(self, seconds: float) -> None:
        """So long ago was the last beat. If that is long, the whole process was stopped: no step is to blame."""
        if self._since is not None and seconds > ASLEEP_S:
            self._since = min(self._since + seconds, self.clock())

    def beat(self) -> Heartbeat:
        since = self._since
        busy = 0.0 if since is None else self.clock() - since
        if (limit := self._limit) is not None:
            return Heartbeat(self.steps, busy, limit)
        if self.rate is None:
            return Heartbeat(self.steps, busy, self.first)
        return Heartbeat(self.steps, busy, FLOOR_S + FACTOR * self.rate * self._tokens)

    def send_by(self, send: Callable[[Heartbeat], None]) -> None:
        """A thread that beats until the process ends, or nobody hears it."""

        def run() -> None:
            before = self.clock()
            while True:
                self.slept(self.clock() - before)
                before = self.clock()
                try:
                    send(self.beat())
                except OSError:
                    return
                time.sleep(BEAT_EVERY_S)

        threading.Thread(target=run, name="pulse", daemon=True).start()


class TimedExecutor:
    """An executor whose steps are measured."""

    def __init__(self, executor: Executor, pulse: Watchdog):
        self._executor, self._pulse = executor, pulse
        self.recoverable = executor.recoverable

    def launch(self, plan: StepPlan) -> StepFuture:
        tokens = sum(item.num_tokens for item in plan.work)
        self._pulse.launched(tokens)
        began = self._pulse.clock()
        return _Measured(self._executor.launch(plan), self._pulse, tokens, began)

    def call(self, name: str, *args: Any) -> list[Any]:
        return self._executor.call(name, *args)

    def close(self) -> None:
        self._executor.close()


class _Measured:
    def __init__(self, pending: StepFuture, pulse: Watchdog, tokens: int, began: float):
        self._pending, self._pulse, self._tokens, self._began = pending, pulse, tokens, began

    def result(self) -> Any:
        result = self._pending.result()
        self._pulse.stepped(self._tokens, self._pulse.clock() - self._began)
        return result
