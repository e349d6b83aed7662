"""SuffixDrafter: where the last tokens of a row occurred before, in it or in past answers, it proposes what followed there.

Knows tokens, rows and scopes. Does not know how proposals are verified. Source: suffix decoding (Oliaro et al.,
arXiv 2411.04975), with an index of pairs of tokens in the place of a tree: it takes a token in O(1).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.features.speculation.copied_runs import CopiedRuns
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.token_index import END, MAX_INDEXED, TokenIndex

LONG_MATCH = 6
"""A match that went on to so many tokens is not compared with others."""
MAX_BYTES = 64 << 20
"""Of all past answers."""
BYTES_PER_TOKEN = 192
"""Of an index: an entry of each array, and one of the dict, which is most of it."""
PAIR = 2


@dataclass(slots=True)
class _SuffixRow:
    pending: list[int]  # tokens that are not in the index yet
    scope: bytes
    num_entered: int  # tokens with which it took the row
    own: TokenIndex = field(default_factory=TokenIndex)
    runs: CopiedRuns = field(default_factory=CopiedRuns)  # of its own text
    # From the end of the text to the place behind its longest match of late in past answers.
    followed: int | None = None


class SuffixDrafter(Drafter):
    """One for each worker.

    Args:
        depth: how many of the last tokens are compared, at most (`suffix_decoding_max_tree_depth`).
        max_answers: past answers that are kept (`suffix_decoding_max_cached_requests`); 0: none.
        factor: proposed tokens for each token that matched (`suffix_decoding_max_spec_factor`).
        least_chance: of the last proposed token, by how often it followed (`suffix_decoding_min_token_prob`).
    """

    observes, is_checked = False, True

    def __init__(self, depth: int, max_answers: int, factor: float, least_chance: float):
        self.depth, self.max_answers = depth, max_answers
        self.factor, self.least_chance = factor, least_chance
        self.rows: dict[int, _SuffixRow] = {}
        self.answers: dict[bytes, TokenIndex] = {}  # by scope
        # scope and length of each answer, the oldest first
        self._ages: deque[tuple[bytes, int]] = deque()
        self.num_bytes = 0

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.rows[row] = _SuffixRow(list(tokens), scope, len(tokens))

    def leave(self, row: int) -> None:
        one = self.rows.pop(row)
        # Some are not in its index where other drafters of a chain had all proposals.
        tokens = one.own.tokens + array("i", one.pending)
        self._add_answer(one.scope, tokens[one.num_entered :])

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        one = self.rows[row]
        if one.pending:
            one.pending += tokens
            return
        one.own.extend(tokens)

    def propose(self, row: int, limit: int) -> list[int]:
        one = self.rows[row]
        if one.pending:
            one.own.extend(one.pending[:MAX_INDEXED])
            del one.pending[:MAX_INDEXED]
        if one.pending or len(one.own.tokens) < PAIR:
            return []
        recent = one.own.tokens[-self.depth :]
        good, drafts = self._continuation(one, one.runs, one.own, recent, limit)
        if good[0] < LONG_MATCH and (index := self.answers.get(one.scope)) is not None:
            better, others = self._continuation(one, None, index, recent, limit)
            if better > good:
                good, drafts = better, others
        if drafts and good[0] == 0:
            self.unsure |= {row}
        return drafts

    def _continuation(
        self, one: _SuffixRow, runs: CopiedRuns | None, index: TokenIndex, recent: array[int], limit: int
    ) -> tuple[tuple[int, float], list[int]]:  # fmt: skip
        """What followed the longest match in an index, behind its length and how many of these tokens are right on average."""
        end = len(one.own.tokens)
        if runs is not None:
            followed = end - runs.distance
        else:
            followed = -1 if one.followed is None else end + one.followed
        places, length = self._longest(index, recent, runs, followed)
        if not places:
            return (0, 0.0), []
        if runs is not None:
            runs.follow(index.tokens, places[0])
        else:
            one.followed = places[0] - end
        most = min(limit, int(self.factor * max(length, 1)))
        drafts, worth = self._likeliest(index, places, most)
        return (length, worth), drafts

    def _longest(
        self, index: TokenIndex, recent: array[int], runs: CopiedRuns | None, followed: int
    ) -> tuple[list[int], int]:
        """The places behind the longest match, and its length: 0 where the text at `followed` had one or two other tokens.

        `runs`: of the row's own text, if that is the index.
        """
        at = followed - index.start
        is_there = PAIR <= at < len(index.tokens) and index.tokens[at] != END
        if is_there and index.tokens[max(at - LONG_MATCH, 0) : at] == recent[-LONG_MATCH:]:
            return [followed], index.match(followed, recent)
        places = index.places(recent if runs is None else None)
        if len(places) > 1:
            lengths = [index.match(place, recent) for place in places]
            longest = max(lengths)
            return [place for place, n in zip(places, lengths, strict=True) if n == longest], longest  # fmt: skip
        if places:
            return places, index.match(places[0], recent)
        if runs is not None and (place := runs.place_after_token(index)) >= 0:
            return [place], 1
        return [followed] if is_there and index.goes_on(followed, recent) else [], 0

    def _likeliest(
        self, index: TokenIndex, places: list[int], limit: int
    ) -> tuple[list[int], float]:
        tokens, chance, worth = index.tokens, 1.0, 0.0
        drafts: list[int] = []
        follow = [place - index.start for place in places]
        while len(drafts) < limit:
            if len(follow) == 1:
                rest = index.after(follow[0] + index.start, limit - len(drafts))
                return drafts + rest, worth + chance * len(rest)
            there = [tokens[at] for at in follow if at < len(tokens)]
            if (token := max(there, key=there.count, default=END)) == END:
                break
            chance *= there.count(token) / len(follow)
            if chance < self.least_chance:
                break
            drafts.append(token)
            worth += chance
            follow = [at + 1 for at in follow if at < len(tokens) and tokens[at] == token]
        return drafts, worth

    def _add_answer(self, scope: bytes, tokens: array[int]) -> None:
        """Keep an answer; the oldest ones make room, whichever scope they have."""
        tokens = tokens[: MAX_BYTES // BYTES_PER_TOKEN - 1]
        if self.max_answers == 0 or len(tokens) <= PAIR:
            return
        self.answers.setdefault(scope, TokenIndex()).add_text(tokens)
        self._ages.append((scope, len(tokens)))
        self.num_bytes += (len(tokens) + 1) * BYTES_PER_TOKEN
        while len(self._ages) > self.max_answers or self.num_bytes > MAX_BYTES:
            scope, count = self._ages.popleft()
            self.answers[scope].drop_text(count)
            self.num_bytes -= (count + 1) * BYTES_PER_TOKEN
            if not self.answers[scope].tokens:
                del self.answers[scope]
