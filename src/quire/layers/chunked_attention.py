"""Attention in chunks: a token attends to the tokens of its chunk, up to itself.

Knows that a row in several chunks is as many rows, each with its own blocks. Does not know how attention is computed.

    chunk of 4        position  0 1 2 3 | 4 5 6 7 | 8 9
    new tokens 6..9   rows                  (4..7)   (8, 9)      with 2 new tokens each

Shape suffixes: B rows, B1 = B + 1, M blocks of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quire.attention.base import AttentionBackend
from quire.errors import ConfigError
from quire.forward_context import ForwardBatch, current_batch
from quire.layers.attention import Attention


class ChunkedAttention(Attention):
    """The chunks have `window` tokens and begin at multiples of it; without a window, a row is one chunk."""

    def bind(self, backend: AttentionBackend, cache: Any, kv_group: int = 0) -> None:
        super().bind(backend, cache, kv_group)
        if self.spec.window is not None and self.spec.window % cache[0].shape[2]:
            raise ConfigError(
                f"block_size={cache[0].shape[2]} does not divide the model's chunks of {self.spec.window} tokens:"
                " choose another"
            )

    def step_metadata(self) -> Any:
        window = self.spec.window
        if window is None or self.backend is None:
            return super().step_metadata()
        batch, key = current_batch(), ~self.kv_group  # layers of the group in chunks share this
        if key not in batch.meta:
            block_size = self.spec.cache[0].shape[2]
            rows = rows_in_chunks(batch, self.kv_group, window, block_size)
            batch.meta[key] = self.backend.plan(rows, self.kv_group)
        return batch.meta[key]


def rows_in_chunks(batch: ForwardBatch, kv_group: int, size: int, block_size: int) -> ForwardBatch:
    """The batch with a row for each chunk of a row that has new tokens, with the blocks of this KV group."""
    counts = batch.query_lens or batch.query_start_B1.diff().tolist()
    ends = batch.lengths or batch.lengths_B.tolist()
    found = []  # row, chunk, new tokens, length in the chunk
    for row, (count, end) in enumerate(zip(counts, ends, strict=False)):
        for chunk in range((end - count) // size, -(-end // size)):
            begin, stop = max(end - count, chunk * size), min(end, (chunk + 1) * size)
            found.append((row, chunk, stop - begin, stop - chunk * size))
    rows, chunks, queries, lengths = (list(each) for each in zip(*found, strict=True))
    table_BM = batch.block_tables[kv_group]
    device, per_chunk = table_BM.device, size // block_size
    row_B, chunk_B = (torch.tensor(each, device=device) for each in (rows, chunks))
    block_BM = chunk_B[:, None] * per_chunk + torch.arange(per_chunk, device=device)
    own_BM = table_BM[row_B[:, None], block_BM.clamp_(max=table_BM.shape[1] - 1)]
    tables = list(batch.block_tables)
    tables[kv_group] = own_BM.contiguous()
    return replace(
        batch,
        rows_B=batch.rows_B[row_B.to(batch.rows_B.device)],
        query_start_B1=torch.tensor([0, *queries], device=device).cumsum(0).int(),
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query=max(queries),
        max_length=max(lengths),
        num_rows=len(rows),
        query_lens=queries,
        lengths=lengths,
        meta={},
    )
