"""BucketCounts: a histogram in the form in which EngineStats contains it.

Knows bounds and counts. Does not know what is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class BucketCounts:
    """Counts of values by bucket, and their sum. `bounds`: the upper bounds, increasing."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._total = 0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_growth(self, total: int) -> None:
        """Add the growth of a counter since the last call."""
        self.add(total - self._total)
        self._total = total

    @property
    def stats(self) -> list[float]:
        return [*map(float, self.counts), self.sum]
