"""Prefill context parallelism: each part of the ranks runs the model on some of a step's tokens.

Knows batches and how their tokens are split (parallel/prefill_context_parallel.py). Does not know layers: an attention layer gathers the
keys and values of all tokens (layers/attention.py). A token's bits do not depend on the other tokens of its batch, nor on
chunks, and a piece of a row is a chunk. So results have the same bits for any number of parts.

Shape suffixes: T tokens, B rows, B1 = B + 1, D features.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.forward_context import ForwardBatch, replace_current_batch
from quire.parallel.prefill_context_parallel import SplitTokens, should_split
from quire.parallel.ranks import RankGroup
from quire.worker.model_input import TokenModelInput

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan


class ContextModelInput(TokenModelInput):
    """Deals the tokens of large steps out to the parts; every part computes a small step, such as one of decoding, by itself.

    Args:
        ranks: the parts that exchange keys and values with this one.
    """

    def __init__(self, model: LanguageModel, ranks: RankGroup):
        super().__init__(model)
        self.ranks = ranks

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return not should_split([item.num_tokens for item in plan.work], self.ranks.size)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of all tokens of the batch."""
        if not should_split(batch.query_lens, self.ranks.size):
            return super().forward(batch)
        embeddings_TD, positions = self.inputs(batch)
        split = SplitTokens(self.ranks, batch.query_lens)
        own = batch_of_part(batch, split)
        with replace_current_batch(own):
            hidden_TD = self.model(embeddings_TD[split.own_T], positions[split.own_T])
        for number, states_TD in own.hidden_states.items():
            batch.hidden_states[number] = split.in_order(states_TD)
        return split.in_order(hidden_TD)


def batch_of_part(batch: ForwardBatch, split: SplitTokens) -> ForwardBatch:
    """The batch of this part's tokens: each piece of a row is a row, and slots has the slots of all parts' tokens."""
    pieces, own_T = split.pieces, split.own_T
    rows = [piece.row for piece in pieces]
    counts = [piece.length for piece in pieces]
    ends = [
        batch.lengths[row] - batch.query_lens[row] + first + count for row, first, count in pieces
    ]
    row_B, index = torch.tensor(rows), {"T": own_T, "B": torch.tensor(rows)}
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[own_T],
        positions_T=batch.positions_T[own_T],
        rows_B=batch.rows_B[row_B],
        query_start_B1=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        lengths_B=torch.tensor(ends, dtype=torch.int32),
        block_tables=[table_BM[row_B] for table_BM in batch.block_tables],
        slots=[split.slots(slots_T) for slots_T in batch.slots],
        max_query=max(counts),
        max_length=max(ends),
        num_tokens=len(own_T),
        num_rows=len(rows),
        query_lens=counts,
        lengths=ends,
        drawing=[],
        rows_S=np.zeros(0, np.int64),
        lengths_S=np.zeros(0, np.int64),
        meta={},
        extras={name: each[index[name[-1]]] for name, each in batch.extras.items()},
        embeddings=[],
        hidden_states={},
        split_tokens=split,
        whole=batch,
    )
