"""NgramDrafter: if the last tokens of a row occurred before in it, it proposes the tokens that followed there.

Source: prompt lookup decoding (Saxena, 2023), as in vLLM's method `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.features.speculation.drafter import Drafter

MAX_INDEXED = 4096
"""Tokens of a row that one call adds to the index: a long prompt takes several steps."""


@dataclass(slots=True)
class _IndexedRow:
    tokens: list[int]
    num_indexed: int = 0
    # the first and the last place after the tokens of each n-gram
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """O(1) for each token: an index of the n-grams of `shortest` tokens; longer matches are compared token by token.

    Args:
        shortest, longest: how many of the last tokens must have occurred before (`prompt_lookup_min`, `prompt_lookup_max`).
    """

    observes = False

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self.rows: dict[int, _IndexedRow] = {}

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.rows[row] = _IndexedRow(list(tokens))

    def leave(self, row: int) -> None:
        del self.rows[row]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].tokens += tokens

    def propose(self, row: int, limit: int) -> list[int]:
        one = self.rows[row]
        self._index(one)
        found = one.places.get(tuple(one.tokens[-self.shortest :]))
        if found is None:
            return []
        first, last = found
        start = last if self._match(one.tokens, last) >= self._match(one.tokens, first) else first
        return one.tokens[start : start + limit]

    def _index(self, one: _IndexedRow) -> None:
        """Add n-grams that a token follows."""
        tokens, places, size = one.tokens, one.places, self.shortest
        start = max(one.num_indexed, size)
        end = min(len(tokens), start + MAX_INDEXED)
        for place in range(start, end):
            gram = tuple(tokens[place - size : place])
            first, _ = places.get(gram, (place, place))
            places[gram] = first, place
        one.num_indexed = end

    def _match(self, tokens: list[int], place: int) -> int:
        """How many tokens before `place` equal the last ones, at most `longest`."""
        most = min(self.longest, place)
        for count in range(self.shortest, most):
            if tokens[place - 1 - count] != tokens[-1 - count]:
                return count
        return most
