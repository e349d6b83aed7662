"""NgramDrafter: if the last tokens of a row occurred before in it, it proposes the tokens that followed there.

Source: prompt lookup decoding (Saxena, 2023), as in vLLM's method `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.features.speculation.copied_runs import CopiedRuns
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.token_index import MAX_INDEXED, TokenIndex

MAX_COMPARED = 4
"""Earlier occurrences that are compared."""


@dataclass(slots=True)
class _IndexedRow:
    index: TokenIndex
    pending: list[int]  # tokens that are not in the index yet
    runs: CopiedRuns = field(default_factory=CopiedRuns)


class NgramDrafter(Drafter):
    """O(1) for each token: an index of the n-grams of `shortest` tokens; longer matches are compared token by token.

    Args:
        shortest, longest: how many of the last tokens must have occurred before (`prompt_lookup_min`, `prompt_lookup_max`).
    """

    observes, is_checked = False, True

    def __init__(self, shortest: int, longest: int):
        self.shortest, self.longest = shortest, longest
        self.rows: dict[int, _IndexedRow] = {}

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.rows[row] = _IndexedRow(TokenIndex(max(self.shortest, 2)), list(tokens))

    def leave(self, row: int) -> None:
        del self.rows[row]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].pending += tokens

    def propose(self, row: int, limit: int) -> list[int]:
        """Of several earlier places, what followed the longest match, and of equal ones the last."""
        one = self.rows[row]
        index = one.index
        index.extend(one.pending[:MAX_INDEXED])
        del one.pending[:MAX_INDEXED]
        if one.pending:
            return []
        place = self._longest(index)
        if place < 0 and self.shortest == 1:
            place = one.runs.place_after_token(index)
        if place < 0:  # one or two tokens may be others than in the text that it followed
            place = len(index.tokens) - one.runs.distance
            if not index.goes_on(place, index.tokens):
                return []
            self.unsure |= {row}
        one.runs.follow(index.tokens, place)
        return index.after(place, limit)

    def _longest(self, index: TokenIndex) -> int:
        """The place behind the longest match of two tokens or more; -1: there is none."""
        recent = index.tokens[-self.longest :]
        best, most = -1, 0
        for place in index.places(most=MAX_COMPARED):
            if (length := index.match(place, recent)) > most:
                best, most = place, length
                if most == self.longest:
                    break
        return best
