"""When to send each request of a load, and how many may run at once.

Knows rates, bursts and limits. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire.errors import ConfigError

T = TypeVar("T")
INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive.

    Args:
        rate: requests per second; infinite: all at once.
        burstiness: 1: a Poisson process; less: burstier; more: evener. The shape of the gamma distribution of gaps.
        ramp: None, "linear" or "exponential": the rate goes from `first` to `last` over the requests.
        most: concurrent requests; further requests wait in the client, and this time is not measured.
    """

    rate: float = INFINITE
    burstiness: float = 1.0
    ramp: str | None = None
    first: float = 0.0
    last: float = 0.0
    most: int | None = None

    def check(self) -> None:
        """Raises ConfigError: an invalid number, or options that exclude each other."""
        if not self.rate > 0:
            raise ConfigError(f"--request-rate {self.rate:g}: must be above 0, or inf")
        if not 0 < self.burstiness < INFINITE:
            raise ConfigError(f"--burstiness {self.burstiness:g}: must be above 0")
        if self.most is not None and self.most < 1:
            raise ConfigError(f"--max-concurrency {self.most}: must be at least 1")
        if self.ramp is None:
            return
        if self.rate != INFINITE:
            raise ConfigError("--ramp-up-strategy sets the request rate; leave --request-rate out")
        if not 0 <= self.first <= self.last or self.last <= 0:
            raise ConfigError(
                "--ramp-up-start-rps and --ramp-up-end-rps: must satisfy 0 <= start <= end and end > 0"
            )
        if self.ramp == "exponential" and not self.first:
            raise ConfigError("--ramp-up-start-rps 0: an exponential ramp starts above 0")

    def rate_at(self, number: int, count: int) -> float:
        """The rate at which request `number` of `count` is sent."""
        if self.ramp is None:
            return self.rate
        done = number / max(count - 1, 1)
        if self.ramp == "exponential":
            return float(self.first * (self.last / self.first) ** done)
        return self.first + (self.last - self.first) * done

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which to send each request; the first is sent at once."""
        draw = random.Random(seed)
        now, times = 0.0, []
        for number in range(count):
            times.append(now)
            rate = max(self.rate_at(number, count), 0.1)
            if rate != INFINITE:
                now += draw.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
        if self.ramp is None and self.rate != INFINITE and times[-1] > 0:
            # The mean of few draws can be far off: scale to the requested rate.
            scale = (count - 1) / self.rate / times[-1]
            times = [when * scale for when in times]
        return times


async def run(
    ask: Callable[[int], Awaitable[T]],
    count: int,
    arrivals: Arrivals,
    seed: int,
    ended: Callable[[T], None] = lambda done: None,
) -> tuple[list[T], float]:
    """Call `ask(0)` ... `ask(count - 1)` at their times.

    Returns:
        their results, in order, and the seconds from the first call to the last end.
    """
    room = asyncio.Semaphore(arrivals.most) if arrivals.most else None

    async def one(number: int) -> T:
        if room is None:
            done = await ask(number)
        else:
            async with room:
                done = await ask(number)
        ended(done)
        return done

    start = time.perf_counter()
    tasks: list[asyncio.Task[T]] = []
    async with asyncio.TaskGroup() as group:
        for number, when in enumerate(arrivals.times(count, seed)):
            wait = start + when - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(number)))
    return [task.result() for task in tasks], time.perf_counter() - start


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The largest number of (start, end) spans that overlap."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most
