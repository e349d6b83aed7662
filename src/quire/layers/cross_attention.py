"""Cross attention: this step's tokens attend to the encoder's states of their rows.

Knows the lengths of `ForwardBatch.encoder`. Does not know what the encoder reads. Keys and values are in the KV cache, in a
group whose blocks count states: the first step of a row writes them, and later steps only read them.

Shape suffixes: T tokens of this step, S encoder states of the rows that enter, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.forward_context import EncoderStates, ForwardBatch, current_batch
from quire.layers.attention import Attention


class CrossAttention(Attention):
    """Attention to encoder states. Call it with keys and values of `new_states()`, if there are any.

    Args:
        max_encoder_len: the most states of a row.
        options: as of `Attention`; windows, sinks and `shared` are not supported.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_encoder_len: int,
        **options: Any,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, causal=False, **options)
        self.spec = replace(self.spec, max_encoder_len=max_encoder_len)

    def new_states(self) -> Tensor | None:
        """states_SD whose keys and values this step has to write, one row after the other; None: all rows have theirs.

        Raises:
            RuntimeError: no hook has put them into the batch, or another number of them.
        """
        encoder = _encoder(current_batch())
        if not encoder.new_rows:
            return None
        num_states = sum(encoder.lengths[row] for row in encoder.new_rows)
        states_SD = encoder.states_SD
        if states_SD is None or len(states_SD) != num_states:
            given = "none" if states_SD is None else str(len(states_SD))
            raise RuntimeError(
                f"the rows that enter have {num_states} encoder states, and the batch has {given}"
            )
        return states_SD

    def adapters_of_states(self) -> Tensor | None:
        """numbers_S of `new_states()`; None: no row has an adapter."""
        return _encoder(current_batch()).adapters_S

    def step_metadata(self) -> Any:
        """As `Attention.step_metadata`, of the rows' encoder states."""
        if self.backend is None:
            raise RuntimeError(f"attention layer {self.layer_index} has no backend yet")
        batch = current_batch()
        meta = batch.meta.get(self.kv_group)
        if meta is None:
            attends_ahead = self.backend.can.non_causal
            view = rows_of_states(batch) if attends_ahead else tokens_as_rows(batch, self.kv_group)
            meta = batch.meta[self.kv_group] = self.backend.plan(view, self.kv_group)
        return meta


def _encoder(batch: ForwardBatch) -> EncoderStates:
    if batch.encoder is None:
        raise RuntimeError("a step of a model with cross attention has no encoder lengths")
    return batch.encoder


def rows_of_states(batch: ForwardBatch) -> ForwardBatch:
    """The batch for a backend in which a token may attend to its row's whole context: the states are the context."""
    lengths = _encoder(batch).lengths
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=batch.lengths_B.device)
    return replace(batch, lengths=lengths, lengths_B=lengths_B, max_length=max(lengths), meta={})


def tokens_as_rows(batch: ForwardBatch, kv_group: int) -> ForwardBatch:
    """The batch for a causal backend: each token is a row of its own, at the end of the states, and so attends to all of them."""
    lengths = _encoder(batch).lengths
    row_T = [row for row, count in enumerate(batch.query_lens) for _ in range(count)]
    lengths_T = [lengths[row] for row in row_T]
    device, count = batch.lengths_B.device, len(row_T)
    tables = list(batch.block_tables)
    tables[kv_group] = tables[kv_group][torch.tensor(row_T, device=device)]
    return replace(
        batch,
        query_start_B1=torch.arange(count + 1, dtype=torch.int32, device=device),
        lengths_B=torch.tensor(lengths_T, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query=1,
        max_length=max(lengths),
        num_rows=count,
        query_lens=[1] * count,
        lengths=lengths_T,
        meta={},
    )
