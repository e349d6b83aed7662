"""MeasuredTimes: how long something takes by its size, as measured of late."""

from __future__ import annotations


class MeasuredTimes:
    """Seconds by size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def learn(self, size: int, seconds: float) -> bool:
        """Whether the size is new. A slow run may be the machine's fault: the least of late counts, and a first one counts as at
        most twice what was expected."""
        before, expected = self._seconds.get(size), self(size)
        if before is not None:
            self._seconds[size] = min(seconds, before + 0.1 * (seconds - before))
        else:
            self._seconds[size] = min(seconds, 2 * expected) if expected else seconds
        return before is None

    def sizes(self, first: float, end: float) -> set[int]:
        """Those that were measured, from `first` to before `end`."""
        return {size for size in self._seconds if first <= size < end}

    def __call__(self, size: int, unknown: float = 0.0) -> float:
        """As measured, between the next sizes that were, or on the line through the two largest.

        If only one was measured, up to twice its size is taken to cost no more: it will be measured. `unknown`: if none was.
        """
        if (known := self._seconds.get(size)) is not None:
            return known
        below = max((n for n in self._seconds if n < size), default=0)
        above = min((n for n in self._seconds if n > size), default=0)
        if not below:
            return self._seconds.get(above, unknown)
        if not above:
            before = max((n for n in self._seconds if n < below), default=0)
            if not before:
                return self._seconds[below] * max(size / (2 * below), 1.0)
            slope = max(self._seconds[below] - self._seconds[before], 0.0) / (below - before)
            return self._seconds[below] + slope * (size - below)
        share = (size - below) / (above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]
