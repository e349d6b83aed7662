"""SplitTokens: the tokens of a step, split over the parts of prefill context parallelism.

Knows how many new tokens each row has. Does not know layers or the KV cache. Every part computes some of the tokens; keys and
values of all tokens reach all parts, so each part's KV cache is whole. A token attends to what is before it, so the end of a
row costs more than its begin: a row is cut into two pieces for each part, and part p gets piece p from either end.

    1 row of 8 tokens, 2 parts    part 0: 0 1 . . . . 6 7        part 1: . . 2 3 4 5 . .

Shape suffixes: T tokens of this part, P places: the parts' tokens in turn, W features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.parallel.ranks import RankGroup

LEAST = 16
"""Tokens for each part: with fewer in a step, the weights take its time, and every part computes all of them."""


class RowPiece(NamedTuple):
    """`length` new tokens of a row, from the row's new token number `first` on."""

    row: int
    first: int
    length: int


def should_split(counts: Sequence[int], parts: int) -> bool:
    """Whether a step of rows with these numbers of new tokens is split: it has enough tokens, and every part gets some."""
    return sum(counts) >= LEAST * parts and (len(counts) >= parts or max(counts) >= 2 * parts)


def split_rows(counts: Sequence[int], parts: int) -> list[list[RowPiece]]:
    """By part: its pieces of rows with these numbers of new tokens. A short row is one piece, of the part with the fewest tokens."""
    found: list[list[RowPiece]] = [[] for _ in range(parts)]
    loads = [0] * parts
    pieces = 2 * parts
    for row, count in enumerate(counts):
        if count < pieces:
            cuts, turns = [0, count], [loads.index(min(loads))]
        else:
            cuts = [count * number // pieces for number in range(pieces + 1)]
            turns = [*range(parts), *reversed(range(parts))]
        for number, part in enumerate(turns):
            first, length = cuts[number], cuts[number + 1] - cuts[number]
            if length:
                found[part].append(RowPiece(row, first, length))
                loads[part] += length
    return found


class SplitTokens:
    """This part's tokens of a step, and the exchange with the other parts.

    Args:
        ranks: the parts of this group.
        counts: new tokens of each row.

    Attributes:
        pieces: of this part.
        own_T: which of the step's tokens this part computes.
    """

    def __init__(self, ranks: RankGroup, counts: Sequence[int]):
        self.ranks = ranks
        parts = split_rows(counts, ranks.size)
        self.pieces = parts[ranks.rank]
        starts = np.concatenate(([0], np.cumsum(counts)))
        tokens = [
            np.concatenate([starts[row] + np.arange(first, first + n) for row, first, n in pieces])
            for pieces in parts
        ]
        self.most = max(len(each) for each in tokens)
        token_P = np.full((self.most, ranks.size), -1)
        for part, each in enumerate(tokens):
            token_P[: len(each), part] = each
        flat_P = token_P.reshape(-1)
        place = np.zeros(int(starts[-1]), np.int64)
        place[flat_P[flat_P >= 0]] = np.flatnonzero(flat_P >= 0)
        self.own_T = torch.from_numpy(tokens[ranks.rank])
        self._token_P, self._place = torch.from_numpy(flat_P), torch.from_numpy(place)

    def gather(self, x_TW: Tensor) -> Tensor:
        """x_PW: the rows of all parts' tokens. A part with fewer tokens than another gives zeros at its end."""
        missing = self.most - len(x_TW)
        padded = F.pad(x_TW, (0, 0, 0, missing)) if missing else x_TW
        return self.ranks.gather(padded).view(self._token_P.shape[0], -1)

    def in_order(self, x_TW: Tensor) -> Tensor:
        """The rows of all parts' tokens, in the order of the step."""
        return self.gather(x_TW)[self._place]

    def slots(self, slots: Tensor) -> Tensor:
        """slots_P of the places, from the slots of the step's tokens; the null block's, where no token is."""
        return torch.where(self._token_P < 0, 0, slots[self._token_P.clamp(min=0)])
