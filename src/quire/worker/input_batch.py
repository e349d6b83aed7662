"""Builds a ForwardBatch from a StepPlan: the plan's integers become the tensors of one forward pass.

Knows rows and plans. Does not know models, attention backends or sampling. The host knows everything but the
token ids, so it computes with numpy and makes one tensor of each result.

Shape suffixes: T tokens of this step, B rows of this step, B1 = B + 1, M blocks of a row, S sampled positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.protocol.plan import StepPlan
from quire.worker.model_input import ROPE_POSITIONS
from quire.worker.request_rows import RequestRows


@dataclass(slots=True)
class BatchShape:
    """A step's integers, int64 on the host."""

    rows_B: np.ndarray
    count_B: np.ndarray
    start_B: np.ndarray
    end_B: np.ndarray
    # indices of the rows that draw; a row with draft tokens draws at several positions
    drawing_S: np.ndarray
    lengths_S: np.ndarray  # tokens before the one that is drawn
    query_start_B1: np.ndarray
    query_lens: list[int]  # as count_B
    lengths: list[int]  # as end_B

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_B1[-1])

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def sample_at_S(self) -> np.ndarray:
        # tokens of the row after this position
        after_S = self.end_B[self.drawing_S] - self.lengths_S
        found: np.ndarray = self.query_start_B1[self.drawing_S + 1] - 1 - after_S
        return found

    def batch(self, **tensors: Any) -> ForwardBatch:
        """The batch of these counts and the given tensors."""
        return ForwardBatch(
            max_query=max(self.query_lens),
            max_length=self.longest,
            num_tokens=self.num_tokens,
            num_rows=len(self.rows_B),
            query_lens=self.query_lens,
            lengths=self.lengths,
            drawing=self.drawing_S.tolist(),
            rows_S=self.rows_B[self.drawing_S],
            lengths_S=self.lengths_S,
            **tensors,
        )


class InputBatchBuilder:
    """Builds a batch from a plan whose requests are in their rows, and advances the rows' counts."""

    def __init__(self, rows: RequestRows):
        self.rows = rows

    def build(self, plan: StepPlan) -> ForwardBatch:
        """The batch of `plan.work`; row b is work item b. Advances `rows.num_computed_tokens`.

        Raises:
            RuntimeError: a row has fewer tokens than the plan wants to compute.
        """
        counts = self.count(plan)
        rows_B, start_B, starts_B1 = counts.rows_B, counts.start_B, counts.query_start_B1
        if counts.num_tokens == len(rows_B):
            row_T, position_T = rows_B, start_B
        else:
            row_T = np.repeat(rows_B, counts.count_B)
            position_T = np.arange(counts.num_tokens)
            position_T += np.repeat(start_B - starts_B1[:-1], counts.count_B)
        tables, slots = self._tables_and_slots(rows_B, row_T, position_T, counts.longest)
        tensor = self.rows.tensor
        return self.with_encoder(
            counts,
            token_ids_T=self.rows.tokens(row_T, position_T),
            positions_T=(positions_T := tensor(position_T)),
            extras=self._rope_positions(counts, positions_T),
            rows_B=tensor(rows_B),
            query_start_B1=tensor(starts_B1.astype(np.int32)),
            lengths_B=tensor(counts.end_B.astype(np.int32)),
            block_tables=tables,
            slots=slots,
            sample_at_S=tensor(counts.sample_at_S),
        )

    def with_encoder(self, counts: BatchShape, **tensors: Any) -> ForwardBatch:
        """The batch, with the encoder's states of its rows, if the model has cross attention."""
        batch = counts.batch(**tensors)
        rows = self.rows
        if rows.encoder is not None:
            rows.encoder.add_to(batch, counts.rows_B, rows.blocks, rows.tensor)
        return batch

    def count(self, plan: StepPlan) -> BatchShape:
        """Compute what the host knows of a step, and advance the rows. Raises: as `build`."""
        rows, work = self.rows, plan.work
        rows.grow(work)
        rows_B = np.array([item.row for item in work], np.int64)
        count_B = np.array([item.num_tokens for item in work], np.int64)
        drafts_B = np.array([item.drafts for item in work], np.int64)
        start_B, length_B = rows.num_computed_tokens[rows_B], rows.length[rows_B]
        known_B = length_B - rows.num_drafts[rows_B]
        end_B = start_B + count_B
        if (end_B - drafts_B > known_B).any() or count_B.min() < 1:
            raise RuntimeError(f"step {plan.step}: a row lacks the tokens that the plan computes")
        np.minimum(end_B, length_B, out=end_B)  # the plan allows for more draft tokens
        np.subtract(end_B, start_B, out=count_B)
        samples_B = np.array([item.samples for item in work], bool) & (end_B >= known_B)
        query_start_B1 = np.zeros(len(work) + 1, np.int64)
        count_B.cumsum(out=query_start_B1[1:])
        rows.advance(rows_B, end_B, samples_B)
        drawing_S, lengths_S = _draws(samples_B, known_B, end_B)
        return BatchShape(
            rows_B, count_B, start_B, end_B, drawing_S, lengths_S, query_start_B1, count_B.tolist(),
            end_B.tolist(),
        )  # fmt: skip

    def _rope_positions(self, counts: BatchShape, positions_T: Tensor) -> dict[str, Tensor]:
        """The batch's ROPE_POSITIONS, if rows have an offset."""
        offset_B = self.rows.rope_offset[counts.rows_B]
        if not offset_B.any():
            return {}
        offset_T = self.rows.tensor(np.repeat(offset_B, counts.count_B))
        return {ROPE_POSITIONS: positions_T + offset_T}

    def _tables_and_slots(
        self, rows_B: np.ndarray, row_T: np.ndarray, position_T: np.ndarray, longest: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """By KV group: block tables as wide as the longest row needs, and the slot of each token."""
        size = self.rows.block_size
        index_T, offset_T = np.divmod(position_T, size)
        width = -(-longest // size)
        tables, slots = [], []
        for blocks in self.rows.blocks:
            tables.append(self.rows.tensor(blocks[rows_B, :width]))
            first_T = blocks[row_T, index_T].astype(np.int64) * size
            slots.append(self.rows.tensor(first_T + offset_T))
        return tables, slots


def _draws(
    samples_B: np.ndarray, known_B: np.ndarray, end_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(drawing_S, lengths_S): a row that has no token to compute after its known ones draws once, and once after each
    draft token that the step computes."""
    rows = samples_B.nonzero()[0]
    first, last = known_B[rows], end_B[rows]
    if (first == last).all():
        return rows, last
    draws = last - first + 1
    drawing_S = np.repeat(rows, draws)
    number_S = np.arange(len(drawing_S)) - np.repeat(draws.cumsum() - draws, draws)
    return drawing_S, np.repeat(first, draws) + number_S
