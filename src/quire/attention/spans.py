"""Attention of tokens that see later tokens of their row: of a picture, for models that attend in both directions within one.

The step computes them as all tokens, and writes their keys and values. Then each is computed again, as a row of one token whose
context ends with its span. So a token's bits depend neither on the batch nor on chunks, with any backend. A window counts from
the token, as in Transformers: it sees the keys after token - window, and before the span's end; unless the span ignores windows.

Knows rows and block tables. Does not know why tokens see later ones.

Shape suffixes: T tokens of this step, N tokens of spans, B rows, H query heads, D head size (of values: E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.forward_context import ForwardBatch, SeenSpan

Part = tuple[Tensor, int | None, Any]
"""Indices in T of tokens, the window that their rows of one token need, and the backend's metadata."""


def attend_spans(
    backend: AttentionBackend,
    spec: AttentionSpec,
    kv_group: int,
    batch: ForwardBatch,
    q_THD: Tensor,
    o_THE: Tensor,
) -> None:
    """Overwrite in o_THE the outputs of the tokens of `batch.spans`. Their keys and values are in the cache."""
    key = kv_group, spec.window
    if (parts := batch.span_meta.get(key)) is None:
        parts = batch.span_meta[key] = list(_parts(backend, spec.window, kv_group, batch))
    for at_N, window, meta in parts:
        own = replace(spec, window=window)
        o_THE[at_N] = backend.attend(own, q_THD[at_N], None, None, meta)


def _parts(
    backend: AttentionBackend, window: int | None, kv_group: int, batch: ForwardBatch
) -> Iterator[Part]:
    by_window: dict[int | None, list[tuple[int, SeenSpan]]] = {}
    for span in batch.spans:
        if span.windows_only and window is None:
            continue
        for number in range(span.length):
            position = span.start + number
            cut = window is not None and position >= window and not span.ignores_windows
            needed = span.end - 1 - position + (window or 0) if cut else None
            by_window.setdefault(needed, []).append((span.at + number, span))
    for needed, tokens in by_window.items():
        at_N = torch.tensor([at for at, _ in tokens])
        meta = backend.plan(_rows_of_one(batch, at_N, [span for _, span in tokens]), kv_group)
        yield at_N.to(batch.token_ids_T.device), needed, meta


def _rows_of_one(batch: ForwardBatch, at_N: Tensor, spans: list[SeenSpan]) -> ForwardBatch:
    """A batch in which each of the tokens is a row of its own, with the context up to its span's end."""
    count, ends = len(spans), [span.end for span in spans]
    device = batch.token_ids_T.device
    row_N, at_N = torch.tensor([span.row for span in spans]).to(device), at_N.to(device)
    return ForwardBatch(
        batch.token_ids_T[at_N], batch.positions_T[at_N], batch.rows_B[row_N],
        torch.arange(count + 1, dtype=torch.int32, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device), [table_BM[row_N] for table_BM in batch.block_tables],
        [slots_T[at_N] for slots_T in batch.slots], at_N[:0], 1, max(ends), count, count, query_lens=[1] * count, lengths=ends,
    )  # fmt: skip
