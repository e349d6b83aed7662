"""Paged attention in Triton: one kernel (`attention_kernels.py`) in two sizes for any mix of prompts, chunks and single tokens.

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

A latent cache (MLA) has no values: the first E features of a key are its value, so a tile of them is loaded once. Its one KV head
has many query heads, which are divided over programs.

Shape suffixes: T tokens, H query heads, K KV heads, D head size (of values: E), B rows, N blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.triton.attention_kernels import attend_kernel, merge_kernel
from quire.ops.triton.kv_write import is_latent
from quire.ops.triton.launch import EXACT, INTERPRETED, pow2

LATENT_HEADS = 16  # the limit of query heads of a latent cache that share a program
LOG2E = 1.4426950408889634
PROGRAMS = 512  # as many keep a large GPU busy; with fewer, programs share rows
MOST_PARTS = 256 << 20  # limit on bytes of partial results


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
    if itemsize > 2 or head_dim > 256:
        return Sizes(short, short, 32, 512)
    wide = head_dim > 128
    return Sizes(short, max(short, 64 if wide else 128), 32 if wide else 64, 512)


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
        cache: keys [blocks, K, block_size, D], values [.., E]; if quantized, their scales [blocks, K, block_size]. Values may
            be the first E features of the keys (MLA).
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


def latent_group(num_heads: int) -> int:
    """How many query heads of a latent cache share a program: the largest divisor that is not above LATENT_HEADS."""
    return max(n for n in range(1, LATENT_HEADS + 1) if num_heads % n == 0)


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
        self.latent = is_latent(cache)
        heads_each = latent_group(q.shape[1]) if self.latent else q.shape[1] // keys.shape[1]
        self.num_kv_heads = q.shape[1] // heads_each
        self.shared = {
            "H": q.shape[1], "G": heads_each, "E": values.shape[3],
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
            wide = not INTERPRETED and self.shared["BLOCK_E"] > 256
            merge_kernel[(step.num_short, self.num_kv_heads)](
                parts, sums, self.out, self.lse, self.scores.sinks_H,
                step.short_W2, step.starts_B1, step.lengths_B, segments, lines,
                M=pow2(lines), EVERY_ROW=step.short_W2 is None, **self.shared, **EXACT,
                **({"num_warps": 8} if wide else {}),
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
        size = keys.shape[3] - (self.shared["E"] if self.latent else 0)
        warps = self.sizes.warps or _warps(rows, keys.shape[3])
        options = {} if INTERPRETED else {"num_warps": warps, "num_stages": self.sizes.stages}
        attend_kernel[(items, self.num_kv_heads, splits)](
            self.q, keys, values, self.out, self.lse, parts, sums, scores.sinks_H,
            k_scales, v_scales, work, step.table_BN, step.starts_B1, step.lengths_B,
            scores.scale * LOG2E, scale, scores.softcap, self.q.stride(0), self.q.stride(1),
            step.table_BN.stride(0), keys.shape[1] * keys.shape[2], segments, lines, splits,
            D=keys.shape[3], BLOCK_D=pow2(size, 16), BLOCK_SIZE=keys.shape[2], LATENT=self.latent,
            M=rows, S=self.sizes.tile, SCALED=k_scales is not None, CAPPED=bool(scores.softcap), EVERY_ROW=work is None,
            SHARED=splits > 1, **self.shared, **EXACT, **options,
        )  # fmt: skip


def _warps(rows: int, head_dim: int) -> int:
    return 8 if rows > 64 or rows * head_dim > 8192 else 4
