"""DraftRows: the worker's rows as a draft model sees them: the same tokens and blocks, with counts of its own.

Knows which tokens a draft model has computed. Does not know the model. Draft tokens are written after a row's tokens,
where the next step verifies them.

Shape suffixes: T tokens of a pass, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.worker.request_rows import RequestRows


class DraftRows(RequestRows):
    """Shares memory with `rows`, the target's.

    Args:
        shift: the model reads token[i + shift] at position i (1: heads, which continue hidden states).
        own_ids_V: the draft model's token of each of the target's; None: the same ids.
    """

    def __init__(self, rows: RequestRows, shift: int = 0, own_ids_V: Tensor | None = None):
        vars(self).update(vars(rows))
        self.target, self.shift, self.own_ids_V = rows, shift, own_ids_V
        for name in ("num_computed_tokens", "length", "num_drafts", "accepts_drafts"):
            setattr(self, name, np.zeros_like(getattr(rows, name)))

    def tokens(self, rows_T: np.ndarray, places_T: np.ndarray) -> Tensor:
        """What the model reads at these rows and positions, int64, on the device."""
        ids_T = super().tokens(rows_T, places_T + self.shift)
        return ids_T if self.own_ids_V is None else self.own_ids_V[ids_T]

    def capacity(self, row: int) -> int:
        """How many positions the row's blocks have."""
        return int(self.num_blocks[0, row]) * self.block_size

    def set_counts(self, row: int, computed: int, length: int, drafts: int = 0) -> None:
        """`computed` of `length` tokens are in the draft model's KV cache; `drafts` draft tokens follow."""
        self.num_computed_tokens[row], self.length[row] = computed, length + drafts
        self.num_drafts[row] = drafts


class ComputedBlocks:
    """The blocks in which a draft model has computed every position. The prefix cache may give others to a row, too.

    Args:
        kv_group: of the draft model's layers.
    """

    def __init__(self, rows: DraftRows, kv_group: int):
        self.rows, self.kv_group = rows, kv_group
        self._full: set[int] = set()

    def enter(self, new: EnteredRow) -> int:
        """A request takes a row. How many of its cached tokens the draft model has computed."""
        blocks, size = new.blocks[self.kv_group], self.rows.block_size
        cached = new.num_computed_tokens // size
        self._full.difference_update(blocks[cached:])
        # 0 is the null block, which is outside the windows of later tokens
        lacking = (
            index for index in range(cached) if blocks[index] and blocks[index] not in self._full
        )
        return next(lacking, cached) * size

    def allocated(self, blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Rows got these blocks, by group."""
        self._full.difference_update(*(groups[self.kv_group] for groups in blocks))

    def clear(self) -> None:
        """Blocks will be allocated unseen."""
        self._full.clear()

    def computed(self, row: int, start: int, end: int) -> None:
        """The draft model has computed the row's tokens from `start` to `end`, and all before."""
        first, last = start // self.rows.block_size, end // self.rows.block_size
        if last > first:
            self._full.update(self.rows.blocks[self.kv_group][row, first:last].tolist())
