"""How the time of a function grows with its input, on a machine of unknown speed.

Knows the time of the thread that works: other threads, other processes and the garbage collector (which takes a
second to walk through what a thousand tests before this one left) are not counted. A test asks how the time grows
with the input, and never for less than a minimum of seconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIMES = 8  # the larger input, in smaller ones
LIMIT = 3  # as long again may the larger one take, for each of the smaller; with the square of its size it takes TIMES
TRIES = 5  # a machine that stands still stands still once


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector waits meanwhile."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def seconds(work: Callable[[], object]) -> float:
    """What this thread spends on the work."""
    with uncollected():
        begun = time.thread_time()
        work()
        return time.thread_time() - begun


def growth(work: Callable[[int], object], size: int) -> float:
    """How much longer ``TIMES`` as much takes, for each of the ``TIMES``: 1 for linear work, ``TIMES`` for the square."""
    least = float("inf")
    for _ in range(TRIES):
        small = seconds(lambda: work(size))
        least = min(least, seconds(lambda: work(size * TIMES)) / (small * TIMES))
        if least < LIMIT:
            break
    return least
