"""Rows and batches of an accelerator, whose memory is separate from the host's: one copy per step carries all changes.

Knows which integers the device keeps of each row (tokens, blocks) and how a step's integers are packed. Does not know
which device. The host's part of a row is in `request_rows.py`; the result is the same as of `input_batch.py`.

    host     new tokens and blocks of rows, as pieces (row, place, integers) | the step: rows, starts, places, lengths
    device   one copy -> pieces into the tables -> ids, positions, slots and block tables of the step

Shape suffixes: T tokens, B rows of the step, R rows, L token positions, M blocks, X pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.ops.triton.gather_inputs import gather, scatter, slots
from quire.platforms.memory import lazy_zeros
from quire.protocol.plan import StepPlan
from quire.worker.input_batch import InputBatchBuilder
from quire.worker.request_rows import RequestRows
from quire.worker.staging_buffer import LINE, StagingBuffer

TOKENS = -1  # names the table of token ids; block tables are numbered from 0


class DeviceRows(RequestRows):
    """Rows with tables on the device. Changes are staged on the host until the next step is built."""

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device | str = "cpu",
        max_encoder_lens: Mapping[int, int] | None = None,
    ):
        sizes = (max_rows, max_model_len, num_groups, block_size)
        super().__init__(*sizes, device, max_encoder_lens)
        self.tables = [lazy_zeros(blocks.shape, torch.int32, self.device) for blocks in self.blocks]
        self.pieces: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
        self.num_staged = 0
        self.staging = StagingBuffer(0, self.device)

    def write_tokens(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self._stage(TOKENS, row, start, tokens)

    def add_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        for group, new in enumerate(blocks):
            if new:
                self._stage(group, row, int(self.num_blocks[group, row]), new)
        super().add_blocks(row, blocks)

    def _stage(self, table: int, row: int, start: int, values: Sequence[int]) -> None:
        """Add a piece. A flush writes all pieces at once, in no order, so no two may overlap."""
        end = start + len(values)
        staged = self.pieces.setdefault(table, [])
        if any(r == row and a < end and start < a + len(v) for r, a, v in staged):
            self.flush()
            staged = self.pieces.setdefault(table, [])
        staged.append((row, start, values))
        self.num_staged += len(values)

    def flush(self) -> None:
        """Update the tables now, with a copy of their own, when the next step's copy is too late."""
        if self.pieces:
            self.reserve(0)
            self.staging.begin()
            places = self.stage(self.staging)
            self.write(self.staging.upload(), places)

    def num_integers(self) -> int:
        """How many integers `stage` will add to the staging buffer, at most."""
        pieces = sum(len(staged) for staged in self.pieces.values())
        return self.num_staged + 3 * pieces + len(self.pieces) * (1 + 4 * LINE)

    def reserve(self, num_integers: int) -> StagingBuffer:
        """The staging buffer, with room for the staged integers and `num_integers`; it grows by doubling."""
        size = self.num_integers() + num_integers
        if size > self.staging.size:
            if self.staging.is_accelerator:
                torch.accelerator.synchronize(self.device)  # its copies may be in flight
            self.staging = StagingBuffer(max(2 * self.staging.size, size, 4096), self.device)
        return self.staging

    def stage(self, staging: StagingBuffer) -> list[tuple[int, int, list[slice]]]:
        """Add all pieces to the staging buffer; (table, longest piece, slices of rows, places, starts and integers)."""
        pieces = []
        for table, staged in self.pieces.items():
            counts = [len(values) for _, _, values in staged]
            starts = np.zeros(len(staged) + 1, np.int64)
            np.cumsum(counts, out=starts[1:])
            columns = (
                np.array([row for row, _, _ in staged]),
                np.array([start for _, start, _ in staged]),
                starts,
                np.concatenate([np.asarray(values) for _, _, values in staged]),
            )
            pieces.append((table, max(counts), [staging.append(column) for column in columns]))
        self.pieces, self.num_staged = {}, 0
        return pieces

    def write(self, uploaded: Tensor, places: list[tuple[int, int, list[slice]]]) -> None:
        """Write the uploaded pieces into the tables."""
        for table, longest, parts in places:
            if longest:
                table_data = self.token_ids_RL if table == TOKENS else self.tables[table]
                rows_X, places_X, starts_X1, values = (uploaded[part] for part in parts)
                scatter(table_data, rows_X, places_X, starts_X1, values, longest)


class DeviceInputBatchBuilder(InputBatchBuilder):
    """Builds the batch on the device. `InputBatchBuilder` builds it on the host."""

    rows: DeviceRows

    def __init__(self, rows: DeviceRows):
        super().__init__(rows)

    def build(self, plan: StepPlan) -> ForwardBatch:
        """As `InputBatchBuilder.build`, with one copy to the device."""
        rows, counts = self.rows, self.count(plan)
        parts = (counts.rows_B, counts.query_start_B1, counts.start_B, counts.end_B)
        sampled = counts.sample_at_S
        size = sum(len(part) + LINE for part in (*parts, sampled))
        staging = rows.reserve(size)
        staging.begin()
        slices = [staging.append(part) for part in (*parts, sampled)]
        pieces = rows.stage(staging)
        uploaded = staging.upload()
        rows.write(uploaded, pieces)
        rows_B, starts_B1, firsts_B, lengths_B, sample_at_S = (uploaded[part] for part in slices)
        spans = (rows_B, starts_B1, firsts_B, counts.num_tokens, max(counts.query_lens))
        ids_T, positions_T = gather(rows.token_ids_RL, *spans)
        width = -(-counts.longest // rows.block_size)
        return self.with_encoder(
            counts,
            token_ids_T=ids_T,
            positions_T=positions_T,
            extras=self._rope_positions(counts, positions_T),
            rows_B=rows_B.long(),
            query_start_B1=starts_B1,
            lengths_B=lengths_B,
            block_tables=[table[:, :width].index_select(0, rows_B) for table in rows.tables],
            slots=[slots(table, *spans, rows.block_size) for table in rows.tables],
            sample_at_S=sample_at_S.long(),
        )
