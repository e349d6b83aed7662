"""16-bit attention on the CPU by torch's fused kernel, which the reference backend uses for plain layers.

Knows blocks and windows. Does not know softcap, sinks, layers that are not causal, values of another size than keys, or float32: these use the
tiles of `reference.py`, which are batch-invariant. In 16 bits no matrix product on the CPU is batch-invariant, so
nothing is lost here. The kernel multiplies and sums in float32.

    short   a batch of rows with the same number of new tokens: the G query heads of a KV head, and the new tokens,
            become queries of one head, so that keys and values are not repeated
    long    one row: the KV heads become the batch; each block of queries attends to the keys it can see

A row's keys start at the first block inside its window. Rows are padded to the longest of their piece with a full
block, because unwritten memory, or another request's, may hold NaN.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, G = H / K, D head size, B rows of a
piece, N blocks of a row, Q new tokens of a row, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.attention.base import AttentionSpec

PIECE = 8192  # keys that are gathered at once, padding included
QUERY_BLOCK = 512  # queries of a long row that share one range of keys


@dataclass(slots=True)
class Piece:
    """Rows whose keys are gathered together."""

    rows: slice
    entries: Tensor  # int64 [B * K * N]: block * K + head
    num_keys: int  # of the longest row
    stale: (
        tuple[Tensor, Tensor] | None
    )  # each row's last block, and its unused slots: [B, 1, block_size, 1]
    mask: Tensor | None  # of a short piece: added to its scores, [B, 1, Q * G or 1, S]
    # of a long row: queries, keys, mask with the queries in reverse order
    blocks: list[tuple[slice, slice, Tensor]]


Scratch = list[Tensor]
"""Buffers for gathered keys and values, which all layers reuse: new memory costs page faults."""


def supports(spec: AttentionSpec, q_THD: Tensor) -> bool:
    """Whether this file can compute the layer."""
    keys, values = spec.cache[:2]
    return (
        q_THD.device.type == "cpu"
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.dtype == keys.dtype == values.dtype
        and spec.causal
        and spec.softcap is None
        and spec.sinks is None
        and spec.v_head_dim == spec.head_dim
    )


def pieces(
    table_BN: Tensor, lengths: list[int], num_queries: int, spec: AttentionSpec, long: bool
) -> list[Piece]:
    """Split a unit, longest rows first, into pieces; called once per step and window."""
    block_size, window = spec.cache[0].shape[2], spec.window
    firsts = [n - num_queries for n in lengths]
    bases = [0 if window is None else max(0, first - window + 1) // block_size for first in firsts]
    wide = [-(-n // block_size) - base for n, base in zip(lengths, bases, strict=True)]
    found, a = [], 0
    while a < len(lengths):
        b, most = a + 1, wide[a]
        while b < len(lengths):
            most = max(most, wide[b])
            if (b + 1 - a) * most * block_size > PIECE:
                break
            b += 1
        rows = slice(a, b)
        make = _long if long else _short
        found.append(
            make(rows, table_BN[rows], lengths[rows], bases[rows], wide[rows], num_queries, spec)
        )
        a = b
    return found


def _entries(table_BN: Tensor, bases: list[int], wide: list[int], num_kv_heads: int) -> Tensor:
    """Indices of the rows' blocks, for each row and head, in the cache viewed as [blocks * K, block_size * D]."""
    most = max(wide)
    filler_row = wide.index(most)
    filler = int(table_BN[filler_row, bases[filler_row]])  # full, unless no row has a second block
    index_BN = torch.full((len(wide), most), filler)
    for row, (base, n) in enumerate(zip(bases, wide, strict=True)):
        index_BN[row, :n] = table_BN[row, base : base + n]
    heads_K1 = torch.arange(num_kv_heads)[:, None]
    return (index_BN[:, None] * num_kv_heads + heads_K1).flatten()


def _short(
    rows: slice,
    table_BN: Tensor,
    lengths: list[int],
    bases: list[int],
    wide: list[int],
    num_queries: int,
    spec: AttentionSpec,
) -> Piece:
    keys = spec.cache[0]
    block_size, heads_each = keys.shape[2], spec.num_heads // spec.num_kv_heads
    lengths_held = [n - base * block_size for n, base in zip(lengths, bases, strict=True)]
    S = max(lengths_held)
    last_BQ = torch.tensor(lengths_held)[:, None] - num_queries + torch.arange(num_queries)
    key_S = torch.arange(S)
    hidden_BQS = key_S > last_BQ[..., None]
    if spec.window is not None:
        hidden_BQS |= key_S <= last_BQ[..., None] - spec.window
    mask = None
    if hidden_BQS.any():
        if num_queries > 1:
            hidden_BQS = hidden_BQS.repeat_interleave(heads_each, 1)
        mask = _additive_mask(hidden_BQS, keys.dtype)[:, None]
    stale = None
    if min(lengths_held) < S:
        last_B = torch.tensor(wide) - 1
        inside_B = torch.tensor(lengths_held) - last_B * block_size
        positions = torch.arange(block_size)
        stale = last_B, (positions >= inside_B[:, None])[:, None, :, None]
    entries = _entries(table_BN, bases, wide, spec.num_kv_heads)
    return Piece(rows, entries, S, stale, mask, [])


def _long(
    rows: slice,
    table_BN: Tensor,
    lengths: list[int],
    bases: list[int],
    wide: list[int],
    num_queries: int,
    spec: AttentionSpec,
) -> Piece:
    keys = spec.cache[0]
    start = bases[0] * keys.shape[2]
    S, first = lengths[0] - start, lengths[0] - num_queries - start
    blocks = []
    for x in range(0, num_queries, QUERY_BLOCK):
        y = min(x + QUERY_BLOCK, num_queries)
        a = 0 if spec.window is None else max(0, first + x - spec.window + 1)
        b = first + y
        # The mask of query i and key j depends only on j - i: with the queries in reverse order, it is one vector
        # that each query reads one element further on.
        ahead = torch.arange(a - (first + y - 1), b - (first + x))
        hidden = ahead > 0
        if spec.window is not None:
            hidden |= ahead <= -spec.window
        mask = _additive_mask(hidden, keys.dtype).as_strided((y - x, b - a), (1, 1))
        blocks.append((slice(x, y), slice(a, b), mask))
    return Piece(rows, _entries(table_BN, bases, wide, spec.num_kv_heads), S, None, None, blocks)


def _additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(
    spec: AttentionSpec, found: list[Piece], num_queries: int, q_XHD: Tensor, scratch: Scratch
) -> Tensor:
    """q [B * Q, H, D] of a unit's tokens, row by row -> their outputs [B * Q, H, D]."""
    K, G = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    q = q_XHD.view(-1, num_queries, K, G, spec.head_dim)
    outs = []
    for piece in found:
        k_BKSD, v_BKSD = (_gather(cache, piece, scratch, i) for i, cache in enumerate(spec.cache))
        q_BQKGD = q[piece.rows]
        if piece.blocks:
            outs.append(_attend_long(spec, piece, q_BQKGD[0], k_BKSD[0], v_BKSD[0]))
            continue
        q_BKXD = q_BQKGD.transpose(1, 2).flatten(2, 3)
        o_BKXD = F.scaled_dot_product_attention(
            q_BKXD, k_BKSD, v_BKSD, piece.mask, scale=spec.scale
        )
        o_BKQGD = o_BKXD.unflatten(2, (num_queries, G))
        outs.append(o_BKQGD.transpose(1, 2).reshape(-1, K * G, spec.head_dim))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_long(
    spec: AttentionSpec, piece: Piece, q_QKGD: Tensor, k_KSD: Tensor, v_KSD: Tensor
) -> Tensor:
    q_KGQD = q_QKGD.permute(1, 2, 0, 3)
    G = q_KGQD.shape[1]
    o_QKGD = torch.empty_like(q_QKGD)
    for queries, keys, mask in piece.blocks:
        k, v = (x[:, None, keys].expand(-1, G, -1, -1) for x in (k_KSD, v_KSD))
        backwards = q_KGQD[:, :, queries].flip(2)
        o = F.scaled_dot_product_attention(backwards, k, v, mask, scale=spec.scale)
        o_QKGD[queries] = o.flip(2).permute(2, 0, 1, 3)
    return o_QKGD.flatten(1, 2)


def _gather(cache: Tensor, piece: Piece, scratch: Scratch, which: int) -> Tensor:
    """Copy the rows' blocks of cache [blocks, K, block_size, D] to scratch memory, as [B, K, S, D]."""
    _, K, block_size, D = cache.shape
    size = len(piece.entries) * block_size * D
    while len(scratch) <= which:
        scratch.append(cache.new_empty(0))
    if scratch[which].numel() < size or scratch[which].dtype != cache.dtype:
        scratch[which] = cache.new_empty(size)
    into = scratch[which][:size].view(len(piece.entries), block_size * D)
    torch.index_select(cache.view(-1, block_size * D), 0, piece.entries, out=into)
    num_rows = piece.rows.stop - piece.rows.start
    found = into.view(num_rows, K, -1, block_size, D)
    if piece.stale is not None:
        last_B, stale = piece.stale
        row_B = torch.arange(num_rows)
        found[row_B, :, last_B] = found[row_B, :, last_B].masked_fill_(stale, 0)
    return found.flatten(2, 3)[:, :, : piece.num_keys]
