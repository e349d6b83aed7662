"""The hook that replaces the embeddings of some tokens of a prompt.

Knows which tokens of each row have embeddings of their own, and which of them a step computes. Does not know where the
embeddings come from: a feature's subclass calls `put` in `enter`.

Shape suffixes: N tokens with such embeddings, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook
from quire.worker.request_rows import RequestRows


class EmbeddingSpan(NamedTuple):
    """The embeddings of the tokens from position `start` on."""

    start: int
    embeddings_ND: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.embeddings_ND)


class EmbeddingSpans(Hook):
    """Base class of hooks that give tokens of prompts other embeddings. It keeps a span until its last token is computed."""

    order = 20

    def __init__(self, rows: RequestRows):
        self.rows = rows
        self.spans: dict[
            int, list[EmbeddingSpan]
        ] = {}  # by row, those whose last token is not computed

    def put(self, row: int, start: int, embeddings_ND: Tensor) -> None:
        """The tokens of `row` from position `start` on have these embeddings, on any device. Call it in `enter`."""
        span = EmbeddingSpan(start, embeddings_ND.to(self.rows.device))
        if span.end > self.rows.num_computed_tokens[row]:
            self.spans.setdefault(row, []).append(span)

    def leave(self, row: int) -> None:
        self.spans.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        computed = self.rows.num_computed_tokens
        return not any(
            span.start < computed[item.row] + item.num_tokens
            for item in plan.work
            for span in self.spans.get(item.row, ())
        )

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if batch is None or not self.spans:
            return
        offset = 0  # of the row's first token in the batch
        counts = zip(
            plan.work, batch.query_lens, batch.lengths, strict=True
        )  # a plan may have more draft tokens than there are
        for item, count, length in counts:
            if spans := self.spans.get(item.row):
                self._replace(batch, spans, offset, length - count, length)
                self.spans[item.row] = [span for span in spans if span.end > length]
            offset += count

    def _replace(
        self, batch: ForwardBatch, spans: list[EmbeddingSpan], offset: int, first: int, end: int
    ) -> None:
        """The step computes the tokens [first, end) of a row; the first one is token `offset` of the batch."""
        for span in spans:
            start, stop = max(span.start, first), min(span.end, end)
            if start < stop:
                at_N = torch.arange(
                    offset + start - first, offset + stop - first, device=self.rows.device
                )
                batch.embeddings.append((at_N, span.embeddings_ND[start - span.start : stop - span.start]))  # fmt: skip
