"""StepPlan -> Batch: integers of a plan become the tensors of one forward pass.

Knows rows and plans. Does not know models, attention backends or sampling. Everything but the token ids is
known to the host, so it is computed there with numpy; one tensor is made of each.

Shape suffixes: T tokens of this step, B rows of this step, B1 = B + 1, M blocks a row, S sampled places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.batch import Batch
from quire.protocol.plan import StepPlan
from quire.worker.rows import Rows


@dataclass(slots=True)
class Counts:
    """A step's integers, int64 on the host."""

    rows_B: np.ndarray
    count_B: np.ndarray
    start_B: np.ndarray
    end_B: np.ndarray
    samples_B: np.ndarray  # bool
    query_start_B1: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_B1[-1])

    @property
    def longest(self) -> int:
        return int(self.end_B.max())

    @property
    def sample_at_S(self) -> np.ndarray:
        found: np.ndarray = self.query_start_B1[1:][self.samples_B] - 1
        return found

    def batch(self, **tensors: Any) -> Batch:
        """The batch that these and the tensors make."""
        return Batch(
            max_query=int(self.count_B.max()),
            max_length=self.longest,
            num_tokens=self.num_tokens,
            num_rows=len(self.rows_B),
            query_lens=self.count_B.tolist(),
            lengths=self.end_B.tolist(),
            drawing=self.samples_B.nonzero()[0].tolist(),
            **tensors,
        )


class Batcher:
    """Builds a Batch from a plan whose rows are seated, and moves the rows' counts on."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.device = rows.device

    def build(self, plan: StepPlan) -> Batch:
        """The batch of `plan.work`, row b being work item b. `rows.computed` is advanced.

        Raises:
            RuntimeError: a row has not as many tokens as the plan wants to compute.
        """
        counts = self.count(plan)
        rows_B, start_B, starts_B1 = counts.rows_B, counts.start_B, counts.query_start_B1
        if counts.num_tokens == len(rows_B):
            row_T, position_T = rows_B, start_B
        else:
            row_T = np.repeat(rows_B, counts.count_B)
            position_T = np.arange(counts.num_tokens)
            position_T += np.repeat(start_B - starts_B1[:-1], counts.count_B)
        tables, slots = self._places(rows_B, row_T, position_T, counts.longest)
        positions_T = self._tensor(position_T)
        return counts.batch(
            token_ids_T=self.rows.token_ids_RL[self._tensor(row_T), positions_T].long(),
            positions_T=positions_T,
            rows_B=self._tensor(rows_B),
            query_start_B1=self._tensor(starts_B1.astype(np.int32)),
            lengths_B=self._tensor(counts.end_B.astype(np.int32)),
            block_tables=tables,
            slots=slots,
            sample_at_S=self._tensor(counts.sample_at_S),
        )

    def count(self, plan: StepPlan) -> Counts:
        """What the host knows of a step; moves the rows on. Raises: as `build`."""
        rows, work = self.rows, plan.work
        rows.grow(work)
        rows_B = np.array([item.row for item in work], np.int64)
        count_B = np.array([item.num_tokens for item in work], np.int64)
        start_B = rows.computed[rows_B]
        end_B = start_B + count_B
        if (end_B > rows.length[rows_B]).any() or (count_B < 1).any():
            raise RuntimeError(f"step {plan.step}: a row lacks the tokens that the plan computes")
        samples_B = np.array([item.samples for item in work], bool) & (end_B == rows.length[rows_B])
        query_start_B1 = np.zeros(len(work) + 1, np.int64)
        np.cumsum(count_B, out=query_start_B1[1:])
        rows.advance(rows_B, end_B, samples_B)
        return Counts(rows_B, count_B, start_B, end_B, samples_B, query_start_B1)

    def _places(
        self, rows_B: np.ndarray, row_T: np.ndarray, position_T: np.ndarray, longest: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Block tables as wide as the longest row needs, and the slot of each token; by group."""
        size = self.rows.block_size
        index_T, offset_T = np.divmod(position_T, size)
        width = -(-longest // size)
        tables, slots = [], []
        for blocks in self.rows.blocks:
            tables.append(self._tensor(blocks[rows_B, :width]))
            slots.append(self._tensor(blocks[row_T, index_T].astype(np.int64) * size + offset_T))
        return tables, slots

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.to(self.device, non_blocking=True)
