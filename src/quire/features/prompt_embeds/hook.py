"""The hook that reads the embeddings of a request.

Knows their bytes. Does not know which of them a step computes (`worker/embedding_spans.py`).

Shape suffixes: N tokens, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.models.base import LanguageModel
from quire.protocol.plan import EnteredRow
from quire.protocol.request import EMBEDDINGS, MediaItem
from quire.worker.embedding_spans import EmbeddingSpans
from quire.worker.request_rows import RequestRows


class PromptEmbedsHook(EmbeddingSpans):
    """Gives the model the embeddings that a request brings. `dtype`: of the model."""

    name = "prompt_embeds"

    def __init__(self, rows: RequestRows, dtype: str):
        super().__init__(rows)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model: LanguageModel | None = None

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self.model = models[0]

    def enter(self, new: EnteredRow) -> None:
        for items in runs_of(new.media):
            data = bytearray().join(item.data for item in items)
            dtype = getattr(torch, items[0].kind.removeprefix(EMBEDDINGS))
            count = sum(item.length for item in items)
            rows_ND = torch.frombuffer(data, dtype=dtype).view(count, -1).to(self.dtype)
            if (factor := getattr(self.model, "factor_after_lookup", None)) is not None:
                rows_ND = rows_ND * rows_ND.new_tensor(factor)
            self.put(new.row, items[0].start, rows_ND)


def runs_of(media: Sequence[MediaItem]) -> list[list[MediaItem]]:
    """The items that are embeddings, in lists: each has items of one kind whose tokens follow each other."""
    runs: list[list[MediaItem]] = []
    for item in media:
        if not item.kind.startswith(EMBEDDINGS):
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and (item.kind, item.start) == (last.kind, last.start + last.length):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
