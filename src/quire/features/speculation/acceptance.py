"""Acceptance: how often the draft tokens of each row were right of late.

Knows rows and counts. Does not know what draft tokens cost.
"""

from __future__ import annotations

import math

START = 0.6  # of the first rows, at first
START_WEIGHT = 3  # it counts as so many draft tokens
ROW_WEIGHT = 3  # and so does the mean of all rows, with which a row starts
HOPE = 0.5  # standard deviations of its mean that are added to a row's acceptance
MEMORY = 0.8  # the weight of the past in a row's mean
MEMORY_OF_ALL = 0.98  # and in the mean of all rows


class Acceptance:
    """`of`: by row, the chance that its next draft token is right, and half a standard deviation of what is known of it."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        # by row, of late: draft tokens that were accepted, and those that were tried
        self._counts: dict[int, tuple[float, float]] = {}
        self._all = START * START_WEIGHT, float(START_WEIGHT)  # the same, of all rows
        self._new: tuple[tuple[float, float], float] | None = None  # counts and chance of a new row

    def enter(self, row: int) -> None:
        if self._new is None:
            self._set(row, ROW_WEIGHT * self._all[0] / self._all[1], ROW_WEIGHT)
            self._new = self._counts[row], self.of[row]
        self._counts[row], self.of[row] = self._new

    def learn(self, row: int, drafts: int, accepted: int) -> None:
        """`accepted` of a row's draft tokens were right; those after the first wrong one say nothing."""
        more = min(drafts, accepted + 1)
        right, tried = self._counts[row]
        self._set(row, MEMORY * right + accepted, MEMORY * tried + more)
        right, tried = self._all
        self._new = None
        self._all = MEMORY_OF_ALL * right + accepted, MEMORY_OF_ALL * tried + more

    def _set(self, row: int, right: float, tried: float) -> None:
        """The fewer were tried, the more a row may be better than its mean: then it is worth finding out."""
        mean = min(right / tried, 1.0)
        self._counts[row] = right, tried
        self.of[row] = min(mean + HOPE * math.sqrt(mean * (1 - mean) / tried), 1.0)
