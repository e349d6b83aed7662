"""Watchdog: heartbeats of a working process, and how long its current step may take.

Knows a clock, the seconds a token takes, and a function that sends. Does not know the content of a step. The limit
depends on the work: a long prefill on a slow machine is not a hang. Before the first measurement it is `first`.

    allowed = FLOOR + FACTOR * (recent seconds a token) * (tokens of this step)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from quire.protocol.output import Heartbeat
from quire.protocol.plan import StepPlan, StepResult

BEAT_EVERY_S = 0.5
SUSPENDED_S = 2.0
"""A thread that runs every few tenths of a second was suspended if it has not run for so long: a frozen container."""
FLOOR_S = 20.0
FACTOR = 10.0
FORGET = 0.9  # decay of the old rate at each step


class Watchdog:
    """`with watchdog.working(): ...` around everything that must end in time. A StepObserver, to measure steps."""

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic):
        self.first, self.clock = first, clock
        self.rate: float | None = None  # seconds a token
        self.steps = 0
        self._since: float | None = None
        self._tokens = 0  # of the step launched last
        self._launches: dict[int, tuple[int, float]] = {}
        """For each step in flight: its tokens, and when it was launched."""
        self._limit: float | None = None

    @contextmanager
    def working(self, limit: float | None = None) -> Iterator[None]:
        """`limit`: the most seconds it may take, for work that is not a step."""
        self._since, self._limit = self.clock(), limit
        try:
            yield
        finally:
            self._since = None

    def bound(self, function: Callable[..., Any], limit: float) -> Callable[..., Any]:
        """The same function, with a time limit."""

        @wraps(function)
        def working(*args: Any) -> Any:
            with self.working(limit):
                return function(*args)

        return working

    def launched(self, plan: StepPlan) -> None:
        self._tokens = sum(item.num_tokens for item in plan.work)
        self._launches[plan.step] = self._tokens, self.clock()

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        tokens, began = self._launches.pop(step)
        if isinstance(result, BaseException):
            return
        self.steps += 1
        seconds = self.clock() - began
        rate = seconds / max(tokens, 1)
        self.rate = rate if self.rate is None else max(rate, FORGET * self.rate)

    def slept(self, seconds: float) -> None:
        """The last heartbeat was `seconds` ago. If that is long, the process was suspended; no step is to blame."""
        if self._since is not None and seconds > SUSPENDED_S:
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
        """Start a thread that sends heartbeats until the process ends or the receiver is gone."""

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
