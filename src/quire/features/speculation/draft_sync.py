"""DraftSync: the ranks that split a model put the same draft tokens into their rows.

Each rank has drafters of its own. They get the same tokens, but may fail in one rank alone, and how many draft tokens pay off
depends on the ranks' clocks. So after each step the ranks exchange what they propose, once.

Shape suffixes: N rows, and the times before them; R ranks, M the most draft tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from quire.parallel.ranks import RankGroup

Proposals = dict[int, list[int]]
"""By row: its draft tokens."""
NONE, NS = -1, 1_000_000_000


class DraftSync:
    """What all ranks take.

    Args:
        most: draft tokens of a row.
    """

    def __init__(self, ranks: RankGroup, most: int):
        self.ranks, self.most = ranks, most

    def __call__(
        self, numbers: Sequence[float], rows: Sequence[int], proposals: Proposals
    ) -> tuple[list[float], Proposals]:
        """The least of each number (times, and counts) among the ranks; of each row the draft tokens with which the proposals of all ranks begin.

        All ranks call it with the same rows, in the same order; some may have no proposal.
        """
        own_NM = np.full((1 + len(rows), max(self.most, len(numbers))), NONE, np.int64)
        own_NM[0, : len(numbers)] = [int(each * NS) for each in numbers]
        for index, row in enumerate(rows, 1):
            drafts = proposals.get(row, [])
            own_NM[index, : len(drafts)] = drafts
        all_NX = self.ranks.gather(torch.from_numpy(own_NM)).numpy()
        all_NRM = all_NX.reshape(len(own_NM), self.ranks.size, -1)
        least = all_NRM[0].min(0)[: len(numbers)] / NS
        same_NM = (all_NRM[1:] == all_NRM[1:, :1]).all(1) & (all_NRM[1:, 0] != NONE)
        counts_N = np.logical_and.accumulate(same_NM, axis=1).sum(1).tolist()
        agreed = {
            row: proposals[row][:count] for row, count in zip(rows, counts_N, strict=True) if count
        }
        return least.tolist(), agreed
