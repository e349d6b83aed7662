"""MeasuredTimes: how long something takes by its size, as measured of late; MeasuredPasses: the same of passes of a model."""

from __future__ import annotations

FIRST = 2
"""A first time may be the machine's fault: it counts as at most so many times what was expected."""
KEPT_ONCE, KEPT = 64, 512
"""A time is forgotten if its size was not measured again in so many times: one that was measured once, and others."""


class MeasuredTimes:
    """Seconds by size. A larger size takes at least the time of a smaller one."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}  # times of each size
        self._last: dict[int, int] = {}  # its last, by the number of all times
        self._num = 0  # of all sizes

    def learn(self, size: int, seconds: float) -> bool:
        """Whether a size is new, or forgotten. The least of late counts, since load makes times longer, and not shorter."""
        before, count = self._seconds.get(size), self._counts.get(size, 0) + 1
        if before is None:
            expected = self(size)
            self._seconds[size] = min(seconds, FIRST * expected) if expected else seconds
        else:
            self._seconds[size] = min(seconds, before + max(0.1, 1 / count) * (seconds - before))
        self._counts[size], self._last[size] = count, self._num
        self._num += 1
        return (self._num % KEPT_ONCE == 0 and self._forget()) or before is None

    def _forget(self) -> bool:
        kept = {size: KEPT_ONCE if count == 1 else KEPT for size, count in self._counts.items()}
        old = [size for size, last in self._last.items() if last <= self._num - kept[size]]
        for size in old:
            del self._seconds[size], self._counts[size], self._last[size]
        return bool(old)

    def sizes(self, first: float, end: float) -> set[int]:
        """Those that were measured, from `first` to before `end`."""
        return {size for size in self._seconds if first <= size < end}

    def __call__(
        self, size: int, unknown: float = 0.0, first: tuple[int, float] | None = None
    ) -> float:
        """As measured, between the next sizes that were, or on the line through the two largest.

        If only one was measured, up to twice its size is taken to cost no more: it will be measured. `unknown`: if none was.
        `first`: a size, and its time in the place of its own and that of smaller ones.
        """
        known = self._seconds
        if first is not None:
            known = {n: max(seconds, first[1]) for n, seconds in known.items() if n > first[0]}
            known[first[0]] = first[1]
        if not known:
            return unknown
        below = max((n for n in known if n <= size), default=0)
        larger = {n: seconds for n, seconds in known.items() if n >= size}
        if not below:
            return min(larger.values())
        if larger:
            above = min(larger)
            share = (size - below) / (above - below) if above > below else 0.0
            between = (1 - share) * known[below] + share * known[above]
            return min(between, *larger.values())
        before = max((n for n in known if n < below), default=0)
        if not before:
            return known[below] * max(size / (2 * below), 1.0)
        slope = max(known[below] - known[before], 0.0) / (below - before)
        return known[below] + slope * (size - below)


class MeasuredPasses:
    """Seconds of passes of a model, one after the other, by their number and that of the rows."""

    def __init__(self) -> None:
        self.known: dict[int, MeasuredTimes] = {}  # by passes: times by rows

    def learn(self, passes: int, num_rows: int, seconds: float) -> float:
        """The seconds of such passes, as they are known then."""
        if (times := self.known.get(passes)) is None:
            times = self.known[passes] = MeasuredTimes()
        times.learn(num_rows, seconds)
        return times(num_rows)

    def __call__(self, passes: int, num_rows: int) -> float:
        """0 if none was measured. More passes than were measured take the time of these as often; fewer, no more than these."""
        found = (
            times(num_rows) * max(passes / number, 1.0) for number, times in self.known.items()
        )
        return min(found, default=0.0)
