"""Paged attention in Triton: one kernel in two sizes for any mix of prompts, chunks and single tokens.

Knows blocks, windows, softcap, sinks and scales of a cache. Does not know layers or batches.

A program computes one KV head of one work item: consecutive new tokens of one row, with all query heads that share
this KV head (M = tokens x query heads per KV head). An item is `short` if all new tokens of the row fit the small M,
else `long`; this depends on the row alone.

    keys of a row   | segment 0                    | segment 1                    | ...
                    | tile | tile | tile | tile    | tile ...
    online softmax over the tiles of a segment; then the segments are folded into the result in order

Segments and tiles start at multiples of their sizes, counted from the row's first token. If few rows have long
contexts, several programs share a row: each computes some segments, and `merge_kernel` folds them. Otherwise one
program folds its own segments. Both fold with the same operations in the same order. So a row's bits depend neither on
the rest of the batch nor on the split, nor (in float32, where a dot product is a sequence of plain operations) on how
the prompt was chunked. A tile or segment outside a query's context changes no bit of its result.

Shape suffixes: T tokens, H query heads, K KV heads, D head size (of values: E), B rows, N blocks of a row.
In kernels: M rows of a program, S keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import EXACT, INTERPRETED, pow2

LOWEST = tl.constexpr(
    -1e30
)  # the initial running maximum: finite, so that differences are never NaN
LOG2E = 1.4426950408889634
PROGRAMS = 512  # as many keep a large GPU busy; with fewer, programs share rows
MOST_PARTS = 256 << 20  # limit on bytes of partial results
AHEAD = tl.constexpr(4)  # segments that are loaded before the first of them is folded


class Sizes(NamedTuple):
    """Block sizes of the kernel. They may depend on the model, not on the batch."""

    short: int  # M of short items
    long: int  # M of long items
    tile: int  # keys
    segment: int  # keys: a multiple of tile
    stages: int = 2  # pipeline stages; no bits depend on it
    warps: int = 0  # 0: chosen by the other sizes


def sizes_for(heads_each: int, head_dim: int, itemsize: int) -> Sizes:
    """Sizes that fit the registers of a Hopper GPU, by the compiler's report; not timed yet.

    float32 products are sequences of plain operations without tensor cores, for which far smaller blocks fit.
    """
    short = pow2(heads_each, 16)
    if itemsize > 2:
        return Sizes(short, short, 32, 512)
    wide = head_dim > 128
    return Sizes(short, max(short, 64 if wide else 128), 32 if wide else 64, 512)


@triton.jit
def fold(top, total, acc, m, z, o):
    """Fold a segment (m, z, o) into the result. Only the explicit fma operations are fused."""
    new = tl.maximum(top, m)
    a = tl.exp2(top - new)
    b = tl.exp2(m - new)
    total = tl.fma(total, a, z * b)
    acc = tl.fma(acc, a[:, None], o * b[:, None])
    return new, total, acc


@triton.jit
def start_of_fold(sinks_ptr, head, H: tl.constexpr, M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """A sink is a score without a value."""
    if HAS_SINKS:
        top = tl.load(sinks_ptr + tl.minimum(head, H - 1)).to(tl.float32) * 1.4426950408889634
        total = tl.full([M], 1.0, tl.float32)
    else:
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
    return top, total


@triton.jit
def finish(
    out_ptr, lse_ptr, top, total, acc, token, head, live,
    H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    out = acc / total[:, None]
    at = (token.to(tl.int64) * H + head)[:, None] * E + e[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (e < E)[None, :])
    if HAS_LSE:
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + token.to(tl.int64) * H + head, lse, mask=live)


@triton.jit
def segment_of(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, position, low, first, last, factor, scale, softcap,
    stride_block, stride_head_size, kv_head,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """(m, z, o): maximum, sum and output of an online softmax over keys max(first, low) .. last."""
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    m = tl.full([M], LOWEST, tl.float32)
    z = tl.zeros([M], tl.float32)
    o = tl.zeros([M, BLOCK_E], tl.float32)
    for at in range(first, last + 1, S):
        key = at + tl.arange(0, S)
        inside = (key >= low) & (key <= last)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        line = block * stride_block + kv_head * stride_head_size + key % BLOCK_SIZE
        k = tl.load(
            k_ptr + line[None, :] * D + d[:, None],
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALED:
            s = s * tl.load(k_scale_ptr + line, mask=inside, other=0.0)[None, :]
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)), in units of the exponent's base 2
            s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(s * scale)))
        seen = (key[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1) * factor)
        p = tl.exp2(tl.fma(s, factor, -new[:, None]))
        fade = tl.exp2(m - new)
        z = tl.fma(z, fade, tl.sum(p, axis=1))
        if SCALED:
            p = p * tl.load(v_scale_ptr + line, mask=inside, other=0.0)[None, :]
        # Keys that no query sees may be unwritten memory, and 0 times NaN is NaN.
        v = tl.load(
            v_ptr + line[:, None] * E + e[None, :],
            mask=inside[:, None] & (e < E)[None, :],
            other=0.0,
        )
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o * fade[:, None], input_precision="ieee")
        m = new
    return m, z, o


@triton.jit(
    do_not_specialize=["table_width", "num_segments", "lines", "splits"],
    do_not_specialize_on_alignment=["work_ptr"],
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, sums_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    work_ptr, table_ptr, starts_ptr, lengths_ptr, factor, scale, softcap,
    stride_qt, stride_qh, table_width, stride_block, num_segments, lines, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, S: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, SCALED: tl.constexpr,
    EVERY_ROW: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = M // G
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if EVERY_ROW:
        row = item
        first_token = 0
    else:
        row = tl.load(work_ptr + 2 * item)
        first_token = tl.load(work_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    length = tl.load(lengths_ptr + row)
    r = tl.arange(0, M)
    new = first_token + r // G
    head = kv_head * G + r % G
    live = (new < count) & (r < TOKENS * G)
    position = length - count + new
    last = length - count + tl.minimum(first_token + TOKENS, count) - 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count + first_token - WINDOW + 1, 0)
    if CAPPED:
        factor = 1.4426950408889634
    d = tl.arange(0, BLOCK_D)
    q_at = (start + new).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    top, total = start_of_fold(sinks_ptr, head, H, M, HAS_SINKS)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    e = tl.arange(0, BLOCK_E)
    here = table_ptr + row.to(tl.int64) * table_width
    begin = low // SEGMENT + tl.program_id(2)
    for segment in range(begin, last // SEGMENT + 1, splits):
        first = tl.maximum(segment * SEGMENT, low // S * S)
        end = tl.minimum(segment * SEGMENT + SEGMENT - 1, last)
        m, z, o = segment_of(
            q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, here, position, low, first, end, factor, scale, softcap,
            stride_block, BLOCK_SIZE, kv_head, D, E, BLOCK_D, BLOCK_E, BLOCK_SIZE, M, S, WINDOW, CAPPED, SCALED,
        )  # fmt: skip
        if SHARED:
            part = ((item * (H // G) + kv_head).to(tl.int64) * num_segments + segment) * lines
            tl.store(parts_ptr + (part + r)[:, None] * BLOCK_E + e[None, :], o, mask=live[:, None])
            tl.store(sums_ptr + 2 * part + r, m, mask=live)
            tl.store(sums_ptr + 2 * part + lines + r, z, mask=live)
        else:
            top, total, acc = fold(top, total, acc, m, z, o)
    if not SHARED:
        finish(
            out_ptr, lse_ptr, top, total, acc, start + new, head, live, H, E, BLOCK_E, HAS_LSE,
        )  # fmt: skip


@triton.jit
def part_of(parts_ptr, sums_ptr, line, lines, there, r, e, BLOCK_E: tl.constexpr):
    """Load the (m, z, o) of a segment that another program wrote."""
    o = tl.load(parts_ptr + line[:, None] * BLOCK_E + e[None, :], mask=there[:, None], other=0.0)
    m = tl.load(sums_ptr + 2 * line - r, mask=there, other=LOWEST)
    z = tl.load(sums_ptr + 2 * line - r + lines, mask=there, other=0.0)
    return m, z, o


@triton.jit(
    do_not_specialize=["num_segments", "lines"], do_not_specialize_on_alignment=["work_ptr"]
)
def merge_kernel(
    parts_ptr, sums_ptr, out_ptr, lse_ptr, sinks_ptr, work_ptr, starts_ptr, lengths_ptr,
    num_segments, lines,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, M: tl.constexpr,
    SEGMENT: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    EVERY_ROW: tl.constexpr,
):  # fmt: skip
    """Fold the segments of programs that share a row, exactly as `attend_kernel` folds its own."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if EVERY_ROW:
        row = item
    else:
        row = tl.load(work_ptr + 2 * item)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    length = tl.load(lengths_ptr + row)
    r = tl.arange(0, M)
    e = tl.arange(0, BLOCK_E)
    new = r // G
    head = kv_head * G + r % G
    live = (new < count) & (r < lines)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - count - WINDOW + 1, 0)
    top, total = start_of_fold(sinks_ptr, head, H, M, HAS_SINKS)
    acc = tl.zeros([M, BLOCK_E], tl.float32)
    base = (item * (H // G) + kv_head).to(tl.int64) * num_segments
    last = (length - 1) // SEGMENT
    for at in range(low // SEGMENT, last + 1, AHEAD):
        # Load all before the first fold. Segments beyond the last change nothing.
        line = (base + at) * lines + r
        m0, z0, o0 = part_of(parts_ptr, sums_ptr, line, lines, live, r, e, BLOCK_E)
        m1, z1, o1 = part_of(parts_ptr, sums_ptr, line + lines, lines, live & (at < last), r, e, BLOCK_E)  # fmt: skip
        m2, z2, o2 = part_of(parts_ptr, sums_ptr, line + 2 * lines, lines, live & (at + 1 < last), r, e, BLOCK_E)  # fmt: skip
        m3, z3, o3 = part_of(parts_ptr, sums_ptr, line + 3 * lines, lines, live & (at + 2 < last), r, e, BLOCK_E)  # fmt: skip
        top, total, acc = fold(top, total, acc, m0, z0, o0)
        top, total, acc = fold(top, total, acc, m1, z1, o1)
        top, total, acc = fold(top, total, acc, m2, z2, o2)
        top, total, acc = fold(top, total, acc, m3, z3, o3)
    finish(
        out_ptr, lse_ptr, top, total, acc, start + new, head, live, H, E, BLOCK_E, HAS_LSE,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- calls


@dataclass(slots=True)
class PagedAttentionStep:
    """The step metadata of a KV group. Each row has at least one new token."""

    table_BN: Tensor  # int32
    starts_B1: Tensor  # int32
    lengths_B: Tensor  # int32
    rows: int
    short_W2: Tensor | None  # int32 (row, 0) of short items; None: all rows are short
    num_short: int
    long_W2: (
        Tensor | None
    )  # int32 (row, index of its first new token) of long items; None: there are none
    longest: int  # upper bound of the context of a short row
    most: int = 0  # upper bound of the new tokens of a short row; 0: as many as fit


class Scores(NamedTuple):
    """The parameters of scores: scale, window, softcap, sinks."""

    scale: float
    window: int = 0  # 0: none
    softcap: float = 0.0  # 0: none
    sinks_H: Tensor | None = None


def attend(
    q_THD: Tensor,
    cache: tuple[Tensor, ...],
    step: PagedAttentionStep,
    scores: Scores,
    sizes: Sizes,
    lse_TH: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """o_THE in q's dtype. The cache has this step's tokens already.

    Args:
        cache: keys [blocks, K, block_size, D], values [.., E]; if quantized, their scales [blocks, K, block_size].
        lse_TH: float32 output for each softmax's logsumexp (sinks included).
        splits: programs that share a short row; None: as many as keep the device busy. No bits depend on it.
    """
    tokens, num_heads, _ = q_THD.shape
    o_THE = torch.empty(
        (tokens, num_heads, cache[1].shape[3]), dtype=q_THD.dtype, device=q_THD.device
    )
    call = _Call(q_THD, cache, o_THE, step, scores, sizes, lse_TH)
    if step.num_short:
        call.short(splits)
    if step.long_W2 is not None:
        call.long()
    return o_THE


class _Call:
    """The arguments that the launches of short and long items share."""

    def __init__(
        self, q: Tensor, cache: tuple[Tensor, ...], out: Tensor, step: PagedAttentionStep, scores: Scores,
        sizes: Sizes, lse: Tensor | None,
    ):  # fmt: skip
        self.q = q if q.stride(2) == 1 else q.contiguous()
        self.cache, self.out, self.lse = cache, out, lse
        keys, values = cache[:2]
        self.step, self.scores, self.sizes = step, scores, sizes
        self.num_kv_heads = keys.shape[1]
        self.shared = {
            "H": q.shape[1], "G": q.shape[1] // keys.shape[1], "E": values.shape[3],
            "BLOCK_E": pow2(values.shape[3], 16), "SEGMENT": sizes.segment, "WINDOW": scores.window,
            "HAS_SINKS": scores.sinks_H is not None, "HAS_LSE": lse is not None,
        }  # fmt: skip

    def short(self, splits: int | None) -> None:
        step, sizes = self.step, self.sizes
        segments = -(-step.longest // sizes.segment)
        programs = step.num_short * self.num_kv_heads
        each: int = self.shared["G"]
        lines = (step.most or sizes.short // each) * each  # of a program's M, those in use
        if splits is None:
            size = programs * segments * lines * (self.shared["BLOCK_E"] + 2) * 4
            splits = 1 if size > MOST_PARTS else min(segments, max(1, PROGRAMS // programs))
        parts = sums = None
        if splits > 1:
            count = programs * segments * lines
            parts = self.q.new_empty((count, self.shared["BLOCK_E"]), dtype=torch.float32)
            sums = self.q.new_empty((2 * count,), dtype=torch.float32)
        self._launch(step.short_W2, step.num_short, sizes.short, splits, (parts, sums, segments, lines))  # fmt: skip
        if splits > 1:
            merge_kernel[(step.num_short, self.num_kv_heads)](
                parts, sums, self.out, self.lse, self.scores.sinks_H,
                step.short_W2, step.starts_B1, step.lengths_B, segments, lines,
                M=pow2(lines), EVERY_ROW=step.short_W2 is None, **self.shared, **EXACT,
            )  # fmt: skip

    def long(self) -> None:
        work = self.step.long_W2
        if work is not None:
            self._launch(work, len(work), self.sizes.long, 1, (None, None, 0, 0))

    def _launch(
        self, work: Tensor | None, items: int, rows: int, splits: int,
        partly: tuple[Tensor | None, Tensor | None, int, int],
    ) -> None:  # fmt: skip
        """`partly`: buffers for programs that share a row (outputs, sums), segments of a row, lines of a segment."""
        step, scores = self.step, self.scores
        parts, sums, segments, lines = partly
        keys, values, *scales = self.cache
        k_scales, v_scales = scales or (None, None)
        # The softcap computes tanh by exp2 of twice the score over the cap.
        scale = 2 * LOG2E * scores.scale / scores.softcap if scores.softcap else 0.0
        warps = self.sizes.warps or _warps(rows, keys.shape[3])
        options = {} if INTERPRETED else {"num_warps": warps, "num_stages": self.sizes.stages}
        attend_kernel[(items, self.num_kv_heads, splits)](
            self.q, keys, values, self.out, self.lse, parts, sums, scores.sinks_H,
            k_scales, v_scales, work, step.table_BN, step.starts_B1, step.lengths_B,
            scores.scale * LOG2E, scale, scores.softcap, self.q.stride(0), self.q.stride(1),
            step.table_BN.stride(0), self.num_kv_heads * keys.shape[2], segments, lines, splits,
            D=keys.shape[3], BLOCK_D=pow2(keys.shape[3], 16), BLOCK_SIZE=keys.shape[2],
            M=rows, S=self.sizes.tile, SCALED=k_scales is not None, CAPPED=bool(scores.softcap), EVERY_ROW=work is None,
            SHARED=splits > 1, **self.shared, **EXACT, **options,
        )  # fmt: skip


def _warps(rows: int, head_dim: int) -> int:
    return 8 if rows > 64 or rows * head_dim > 8192 else 4
