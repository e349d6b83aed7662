"""CopySource: the earlier text that a text copies, and where the copy continues after a new value.

Knows tokens and places. Does not know n-grams. A JSON record repeats the previous record with other values. A frequent token, such
as a comma, ends each value. After it the text continues as after the next comma of the previous record, rarely as after the
text's last comma.
"""

from __future__ import annotations

from array import array

from quire.features.speculation.token_index import TokenIndex

LEAST_RUN = 2
"""A token alone may be equal by chance."""
NEAR = 16
"""Tokens after a run, in which the next run may begin."""
KEPT = 2
"""Runs: a value is copied from another place than the text around it."""


class CopySource:
    """Of one text. `distance`: from its end back to the place that it last seemed to follow."""

    __slots__ = ("_end", "_first", "_runs", "distance")

    def __init__(self) -> None:
        self.distance = 0
        self._first = -1  # the place from which on it followed; -1: it does not follow any
        self._end = 0  # of the text, up to which that is known
        self._runs: list[int] = []  # the places after them, the last one first

    def follow(self, tokens: array[int], place: int) -> None:
        """The text likely goes on with the tokens at `place`."""
        self._learn(tokens)
        distance = len(tokens) - place
        if self._first < 0 or distance != self.distance:
            self._first = place
        self._end, self.distance = len(tokens), distance

    def place_after_token(self, index: TokenIndex) -> int:
        """The place after the first token near a run that equals the text's last token; without one, the index's place."""
        tokens = index.tokens
        self._learn(tokens)
        for place in self._runs:
            near = tokens[place : min(place + NEAR, len(tokens) - 1)]
            if tokens[-1] in near:
                return place + near.index(tokens[-1]) + 1
        return index.place_after_token()

    def _learn(self, tokens: array[int]) -> None:
        first, end = self._first, self._end
        if first < 0 or end == len(tokens):
            return
        while end < len(tokens) and tokens[end - self.distance] == tokens[end]:
            end += 1
        place = end - self.distance
        if place - first >= LEAST_RUN:
            others = [run for run in self._runs if not first - NEAR <= run <= place]
            self._runs = [place, *others][:KEPT]
        if end < len(tokens):
            self._first = -1
        self._end = end
