"""LookupDrafter: where the last tokens of a row occurred before, it proposes the tokens that followed there.

It looks in the row's own text (method `ngram`: prompt lookup decoding, Saxena 2023), and for `suffix` also in past answers
(suffix decoding, Oliaro et al., arXiv 2411.04975). Knows tokens, rows and scopes. Does not know how proposals are verified.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.features.speculation.copy_source import CopySource
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.past_answers import PastAnswers
from quire.features.speculation.token_index import END, MAX_INDEXED, TokenIndex

LONG_MATCH = 6
"""A place that the text has followed for this many tokens is not compared with other places."""


@dataclass(slots=True)
class _LookupRow:
    index: TokenIndex
    pending: list[int]  # tokens that are not in the index yet
    scope: bytes
    num_entered: int  # tokens with which the request took the row
    runs: CopySource = field(default_factory=CopySource)
    # From the end of the text to the place in past answers that it follows.
    followed: int | None = None


class LookupDrafter(Drafter):
    """Keeps a token index for each row and for the past answers of each scope. Adding a token takes O(1).

    Args:
        shortest, longest: how many of the last tokens must have occurred before (`prompt_lookup_min`, `prompt_lookup_max`;
            `suffix_decoding_max_tree_depth`).
        past: past answers, in which it looks as well.
        factor: draft tokens for each token that matched (`suffix_decoding_max_spec_factor`).
        least_chance: of the last draft token, by how often it followed (`suffix_decoding_min_token_prob`).
    """

    observes, is_checked = False, True

    def __init__(
        self,
        shortest: int,
        longest: int,
        past: PastAnswers | None = None,
        factor: float = math.inf,
        least_chance: float = 0.0,
    ):
        self.shortest, self.longest, self.past = shortest, longest, past
        self.factor, self.least_chance = factor, least_chance
        self.rows: dict[int, _LookupRow] = {}

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        index = TokenIndex(max(self.shortest, 2))
        self.rows[row] = _LookupRow(index, list(tokens), scope, len(tokens))

    def leave(self, row: int) -> None:
        left = self.rows.pop(row)
        if self.past is not None:
            tokens = left.index.tokens + array("i", left.pending)
            self.past.add(left.scope, tokens[left.num_entered :])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row].pending += tokens

    def propose(self, row: int, limit: int) -> list[int]:
        state = self.rows[row]
        index = state.index
        index.extend(state.pending[:MAX_INDEXED])
        del state.pending[:MAX_INDEXED]
        if state.pending or len(index.tokens) < index.size:
            return []
        recent = index.tokens[-self.longest :]
        places, length = self._own_places(state, recent)
        if self.past is not None and length < LONG_MATCH:
            others = self.past.of(state.scope)
            if others is not None:
                more, matched = self._past_places(state, others, recent)
                if matched > length or not places:
                    index, places, length = others, more, matched
        return self._likeliest(index, places, int(min(limit, self.factor * max(length, 1))))

    def _own_places(self, state: _LookupRow, recent: array[int]) -> tuple[list[int], int]:
        """The places after the longest match in the row's text, and its length: 0 where one or two tokens differ there."""
        index, runs = state.index, state.runs
        followed = len(index.tokens) - runs.distance
        if _follows(index, followed, recent):
            places, length = [followed], index.match(followed, recent)
        else:
            places, length = _longest(index, index.places(), recent)
        if not places and self.shortest == 1 and (place := runs.place_after_token(index)) >= 0:
            places, length = [place], 1
        if not places and index.goes_on(followed, index.tokens):
            places = [followed]
        if places:
            runs.follow(index.tokens, places[0])
        return places, length

    def _past_places(
        self, state: _LookupRow, index: TokenIndex, recent: array[int]
    ) -> tuple[list[int], int]:
        """As `_own_places`, in past answers."""
        end = len(state.index.tokens)
        followed = -1 if state.followed is None else end + state.followed
        if _follows(index, followed, recent):
            places, length = [followed], index.match(followed, recent)
        else:
            places, length = _longest(index, index.places(recent), recent)
        if not places and index.goes_on(followed, recent):
            places = [followed]
        if places:
            state.followed = places[0] - end
        return places, length

    def _likeliest(self, index: TokenIndex, places: list[int], limit: int) -> list[int]:
        """At each place of the draft the token that followed most often at `places`."""
        tokens, chance = index.tokens, 1.0
        drafts: list[int] = []
        follow = [place - index.start for place in places]
        while follow and len(drafts) < limit:
            if len(follow) == 1:
                return drafts + index.after(follow[0] + index.start, limit - len(drafts))
            there = [tokens[offset] for offset in follow if offset < len(tokens)]
            if (token := max(there, key=there.count, default=END)) == END:
                break
            chance *= there.count(token) / len(follow)
            if chance < self.least_chance:
                break
            drafts.append(token)
            follow = [
                offset + 1 for offset in follow if offset < len(tokens) and tokens[offset] == token
            ]
        return drafts


def _follows(index: TokenIndex, place: int, recent: array[int]) -> bool:
    """Whether the text has followed `place` for LONG_MATCH tokens."""
    offset = place - index.start
    if not index.size <= offset < len(index.tokens) or index.tokens[offset] == END:
        return False
    return index.tokens[max(offset - LONG_MATCH, 0) : offset] == recent[-LONG_MATCH:]


def _longest(index: TokenIndex, places: list[int], recent: array[int]) -> tuple[list[int], int]:
    """Of places after the last n-gram, those after the longest match, and its length."""
    lengths = [index.match(place, recent) for place in places]
    length = max(lengths, default=0)
    return [place for place, n in zip(places, lengths, strict=True) if n == length], length
