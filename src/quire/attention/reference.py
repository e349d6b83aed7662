"""The reference backend: batch-invariant attention in plain torch, on any device.

Knows blocks, windows, softcap and sinks. Does not know requests or instruction sets.

A row's bits depend neither on the rest of the batch nor on chunking, for three reasons. Keys come in tiles that
start at multiples of the tile size, in order, with an online softmax: a query's products are summed in the same
order in every batch. A fully masked tile changes no bit of a query's state. Every product has at least MIN_ROWS rows,
because matrix libraries sum in another order below that (measured with MKL: from 16 rows on, a row's bits do not
depend on the number of rows).
Sums are float32 for every dtype; tiles of a quantized cache (`kv_quantization.py`) are dequantized to float32.
On the CPU, plain 16-bit layers use `torch_sdpa.py` instead: their linear layers are not batch-invariant anyway.

    unit     rows with the same number of new tokens, longest context first
Shape suffixes: T tokens of this step, H query heads, K key/value heads, G = H / K, D head size (of values:
E), B rows of a unit, N blocks of a row, Q new tokens of a row (padded in products), S keys of a tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.attention import kv_quantization, torch_sdpa
from quire.attention.base import AttentionBackend, AttentionSpec, Capabilities
from quire.forward_context import ForwardBatch

TILE = 128  # keys, when blocks divide it
MIN_ROWS = 16
ALONE = 16  # a row with more new tokens than this forms its own unit
QUERY_BLOCK = 128  # queries of a long row that are scored at once
LOWEST = -1e30  # the initial running maximum: finite, so that differences are never NaN


@dataclass(slots=True)
class Span:
    """The tiles over one range of keys, which are gathered once for all blocks of queries."""

    rows: slice
    entries: Tensor  # int64 [rows * K * blocks per tile]: block * K + head
    unseen_BS: Tensor | None  # True where no query attends to the key: it may be unwritten memory
    # queries of each row; hidden_BQS: True where the query must not attend to the key
    tiles: list[tuple[slice, Tensor | None]]


_Kind = tuple[int | None, bool, int, int, int]


def _kind(spec: AttentionSpec) -> _Kind:
    """What the tiles of a layer depend on: layers of several models may share a KV group."""
    return spec.window, spec.causal, spec.num_heads, spec.num_kv_heads, spec.head_dim


@dataclass(slots=True)
class Unit:
    """Rows that are computed together: the same number of new tokens, longest context first."""

    num_queries: int
    lengths: list[int]
    tokens: Tensor | slice  # indices in T of the unit's tokens, row by row
    table_BN: Tensor  # int64
    spans: dict[_Kind, list[Span]] = field(default_factory=dict)
    pieces: dict[_Kind, list[torch_sdpa.Piece]] = field(default_factory=dict)


@dataclass(slots=True)
class ReferenceStepMetadata:
    """Step metadata that the layers of a KV group share."""

    units: list[Unit]
    slots_T: Tensor
    scratch: torch_sdpa.Scratch = field(default_factory=list)


class ReferenceAttention(AttentionBackend):
    """See the module. Cache layout: `kv_quantization.parts`."""

    can = Capabilities(
        devices=None,
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"auto", *kv_quantization.DTYPES}),
        differing_values=True,
        windows=True,
        softcap=True,
        sinks=True,
        non_causal=True,
        latent=True,
    )

    def __init__(self, tile: int = TILE):
        self.tile = tile

    def plan(self, batch: ForwardBatch, kv_group: int) -> ReferenceStepMetadata:
        """Split the step into units."""
        table_BM, slots_T = batch.block_tables[kv_group], batch.slots[kv_group]
        starts = batch.query_start_B1.tolist()
        queries = batch.query_lens or [b - a for a, b in itertools.pairwise(starts)]
        lengths = batch.lengths or batch.lengths_B.tolist()
        groups_by_shape: dict[tuple[int, int], list[int]] = {}
        for row in range(batch.num_rows):
            if queries[row]:
                alone = row if queries[row] > ALONE else -1
                groups_by_shape.setdefault((queries[row], alone), []).append(row)
        units = []
        for (num_queries, _), rows in groups_by_shape.items():
            rows.sort(key=lambda row: -lengths[row])
            indices = [
                place for row in rows for place in range(starts[row], starts[row] + num_queries)
            ]
            in_order = indices == list(range(indices[0], indices[0] + len(indices)))
            tokens = (
                slice(indices[0], indices[-1] + 1)
                if in_order
                else torch.tensor(indices).to(slots_T.device)
            )
            table = table_BM[torch.tensor(rows).to(table_BM.device)].long()
            units.append(Unit(num_queries, [lengths[row] for row in rows], tokens, table))
        return ReferenceStepMetadata(units, slots_T)

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKE: Tensor | None,
        meta: ReferenceStepMetadata,
    ) -> Tensor:
        """Write k and v to the batch's slots; return o_THE in q's dtype, zeros for padding tokens."""
        o_THE = q_THD.new_zeros(q_THD.shape[0], spec.num_heads, spec.v_head_dim)
        attend = self._attend_fused if torch_sdpa.supports(spec, q_THD) else self._attend_tiles
        is_quantized = kv_quantization.is_quantized(spec.cache)
        if k_TKD is not None and v_TKE is not None:
            if is_quantized:
                kv_quantization.write(spec.cache, k_TKD, v_TKE, meta.slots_T)
            else:
                _write(spec.cache[0], k_TKD, meta.slots_T)
                if not spec.latent:
                    _write(spec.cache[1], v_TKE, meta.slots_T)
        if is_quantized:
            q_THD = kv_quantization.query(q_THD, spec.cache[0].dtype)
        for unit in meta.units:
            o_THE[unit.tokens] = attend(spec, unit, q_THD[unit.tokens], meta).to(o_THE.dtype)
        return o_THE

    def _attend_tiles(
        self, spec: AttentionSpec, unit: Unit, q: Tensor, meta: ReferenceStepMetadata
    ) -> Tensor:
        spans = unit.spans.get(kind := _kind(spec))
        if spans is None:
            num_kv_heads, block_size = spec.cache[0].shape[1:3]
            spans = list(
                _spans(unit, spec.window, spec.causal, num_kv_heads, block_size, self.tile)
            )
            unit.spans[kind] = spans
        return _attend_unit(spec, unit, spans, q)

    def _attend_fused(
        self, spec: AttentionSpec, unit: Unit, q: Tensor, meta: ReferenceStepMetadata
    ) -> Tensor:
        found = unit.pieces.get(kind := _kind(spec))
        if found is None:
            long = unit.num_queries > ALONE
            found = torch_sdpa.pieces(unit.table_BN, unit.lengths, unit.num_queries, spec, long)
            unit.pieces[kind] = found
        return torch_sdpa.attend(spec, found, unit.num_queries, q, meta.scratch)


def _write(cache: Tensor, new_TKD: Tensor, slots_T: Tensor) -> None:
    """Write new tokens to their slots of cache [blocks, K, block_size, D]."""
    block_size = cache.shape[2]
    block_T = torch.div(slots_T, block_size, rounding_mode="floor")
    cache[block_T, :, slots_T - block_T * block_size] = new_TKD.to(cache.dtype)


def _spans(
    unit: Unit, window: int | None, causal: bool, num_kv_heads: int, block_size: int, tile: int
) -> Iterator[Span]:
    """The tiles that some query of the unit attends to, in the order of their keys."""
    per_tile = max(1, tile // block_size)
    size = per_tile * block_size
    device, Q = unit.table_BN.device, unit.num_queries
    firsts = [length - Q for length in unit.lengths]  # position of each row's first new token
    lows = [0 if window is None else max(0, first - window + 1) for first in firsts]
    first_B1 = torch.tensor(firsts, device=device)[:, None]
    for index in range(min(lows) // size, -(-unit.lengths[0] // size)):
        start, stop = index * size, (index + 1) * size
        # Lengths descend, and so do the first visible keys: the rows that see this tile are contiguous.
        a = sum(low >= stop for low in lows)
        b = sum(length > start for length in unit.lengths)
        if a >= b:
            continue
        blocks = unit.table_BN[a:b, index * per_tile : (index + 1) * per_tile]
        blocks = F.pad(blocks, (0, per_tile - blocks.shape[1]))[:, None] * num_kv_heads
        entries = (blocks + torch.arange(num_kv_heads, device=device)[:, None]).flatten()
        key_S = torch.arange(start, stop, device=device)
        at_BQ = first_B1[a:b] + torch.arange(Q, device=device)
        unseen_BS = None
        if stop > unit.lengths[b - 1] or start < lows[a]:
            unseen_BS = (key_S >= first_B1[a:b] + Q) | (key_S < _low(first_B1[a:b], window))
        tiles: list[tuple[slice, Tensor | None]] = []
        for x in range(0, Q, QUERY_BLOCK):
            y = min(Q, x + QUERY_BLOCK)
            if (causal and start > firsts[a] + y - 1) or (
                window and stop <= firsts[b - 1] + x - window + 1
            ):
                continue  # all keys are in the queries' future, or before their windows
            hidden = None
            if not causal:  # only what lies beyond the row's end is hidden
                hidden = None if unseen_BS is None else unseen_BS[:, None].expand(-1, y - x, -1)
            elif stop - 1 > firsts[b - 1] + x or (window and start < firsts[a] + y - window):
                indices = at_BQ[:, x:y, None]
                hidden = key_S > indices
                if window:
                    hidden |= key_S <= indices - window
            tiles.append((slice(x, y), hidden))
        yield Span(slice(a, b), entries, unseen_BS, tiles)


def _low(first_B1: Tensor, window: int | None) -> Tensor:
    return first_B1 * 0 if window is None else first_B1 - window + 1


def _attend_unit(spec: AttentionSpec, unit: Unit, spans: list[Span], q: Tensor) -> Tensor:
    """q [B * Q, H, D] of the unit's tokens -> their outputs [B * Q, H, E], in float32."""
    B, Q, K, E = len(unit.lengths), unit.num_queries, spec.num_kv_heads, spec.v_head_dim
    G = spec.num_heads // K
    q_BKQGD = q.view(B, Q, K, G, -1).permute(0, 2, 1, 3, 4).float() * spec.scale
    last = (Q - 1) // QUERY_BLOCK * QUERY_BLOCK
    rows = max(Q, last - (-MIN_ROWS // G))  # so that the last block also has MIN_ROWS rows
    q_BKQGD = F.pad(q_BKQGD, (0, 0, 0, 0, 0, rows - Q))
    top = q_BKQGD.new_full((B, K, rows, G, 1), LOWEST)
    total = q_BKQGD.new_zeros(B, K, rows, G, 1)
    if spec.sinks is not None:  # a sink is a score without a value
        top = spec.sinks.float().view(1, K, 1, G, 1).expand(B, K, rows, G, 1).clone()
        total += 1
    out = q_BKQGD.new_zeros(B, K, rows, G, E)
    for span in spans:
        k_BKSD = _gather(spec.cache[::2], span)
        v_BKSE = k_BKSD[..., :E] if spec.latent else _gather(spec.cache[1::2], span)
        if span.unseen_BS is not None:  # 0 times unwritten memory may be NaN
            v_BKSE.masked_fill_(span.unseen_BS[:, None, :, None], 0.0)
        for queries, hidden_BQS in span.tiles:
            stop = rows if queries.stop == Q else queries.stop
            indices = (span.rows, slice(None), slice(queries.start, stop))
            _tile(
                spec,
                q_BKQGD[indices],
                k_BKSD,
                v_BKSE,
                hidden_BQS,
                top[indices],
                total[indices],
                out[indices],
            )
    return (out / total)[:, :, :Q].permute(0, 2, 1, 3, 4).reshape(B * Q, spec.num_heads, E)


def _gather(cache: Sequence[Tensor], span: Span) -> Tensor:
    """Copy blocks of keys or values, [blocks, K, block_size, D] -> [B, K, S, D], in float32.

    cache: the elements, and their scales if the cache is quantized.
    """
    shape = (span.rows.stop - span.rows.start, cache[0].shape[1], -1)
    numbers, *scales = (
        kv_quantization.as_bytes(part)
        .flatten(0, 1)
        .flatten(1)
        .index_select(0, span.entries)
        .view(part.dtype)
        for part in cache
    )
    found = numbers.view(*shape, cache[0].shape[3]).float()
    return found if not scales else found * scales[0].view(*shape, 1)


def _tile(
    spec: AttentionSpec,
    q_BKQGD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    hidden_BQS: Tensor | None,
    top: Tensor,
    total: Tensor,
    out: Tensor,
) -> None:
    """One step of the online softmax: add a tile to `top`, `total` and `out` ([B, K, Q, G, 1 or E])."""
    B, K, Q, G, _ = q_BKQGD.shape
    scores = torch.bmm(
        q_BKQGD.reshape(B * K, Q * G, -1), k_BKSD.flatten(0, 1).transpose(1, 2)
    ).view(B, K, Q, G, -1)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if hidden_BQS is not None:
        seen = scores[:, :, : hidden_BQS.shape[1]]  # without the padding
        seen.masked_fill_(hidden_BQS[:, None, :, None], -torch.inf)
    new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
    scores = (scores - new_top).exp_()
    fade = (top - new_top).exp_()
    total.mul_(fade).add_(scores.sum(-1, keepdim=True))
    more = torch.bmm(scores.view(B * K, Q * G, -1), v_BKSE.flatten(0, 1))
    out.mul_(fade).add_(more.view(B, K, Q, G, -1))
    top.copy_(new_top)
