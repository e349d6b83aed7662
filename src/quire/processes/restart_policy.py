"""When a process counts as dead, and when a dead one is started again. Knows times and numbers, and no process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process counts as dead, and how often a dead one is replaced."""

    heartbeat: float = 8.0  # seconds without a heartbeat; 0: no limit
    start: float = 600.0  # seconds in which the model must be loaded
    restarts: int = 3  # immediate restarts within `window`; 0: a dead process is not replaced
    window: float = 600.0
    retry: float = 30.0  # seconds between two starts after more deaths than `restarts`


class Restart(NamedTuple):
    """What follows a death."""

    delay: float | None
    """Seconds until the next start; None: there is none."""
    text: str
    """The same in words, for the log."""


class RestartCount:
    """The recent deaths of one process and of those that replaced it."""

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic):
        self.policy, self._clock = policy, clock
        self._deaths: deque[float] = deque()

    def after_death(self) -> Restart:
        """Count a death that happened now, and decide."""
        policy, now = self.policy, self._clock()
        self._deaths.append(now)
        while now - self._deaths[0] > policy.window:
            self._deaths.popleft()
        count = len(self._deaths)
        if policy.restarts == 0:
            return Restart(None, f"{count} times in a row: it is not restarted")
        if count > policy.restarts:
            text = f"{count} times in a row: restarting it in {policy.retry:.0f} s"
            return Restart(policy.retry, text)
        return Restart(0.0, "restarting it")
