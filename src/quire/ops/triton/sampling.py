"""Sampling in Triton: Gumbel noise, top-k/top-p/min-p cutoffs, penalties and logprobs.

Knows logits, keys and parameters of rows. Does not know requests. Each kernel implements a definition in
`worker/sampling/` (gumbel.py, top_k_top_p.py, builtin_processors.py, logprobs.py). The random bits are the same as the
definition's; the noise made of them may differ in the last bits of a logarithm.

Kernels read a row of logits in chunks of one size. They combine chunks by operations that do not depend on the order
(maxima, counts, integer sums), or in order (sums of exponentials).

Shape suffixes: S rows, V vocabulary, L tokens of a row, R the worker's rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from quire.ops.triton.launch import EXACT, INTERPRETED, pow2

CHUNK = 1024 if INTERPRETED else 4096
PIECE = 1024  # chunk size of kernels with little work per element
WIDE: dict[str, Any] = {} if INTERPRETED else {"num_warps": 8}
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
PLAIN = tl.constexpr(INTERPRETED)
"""Use Triton's own exp and log, which are NumPy's in the interpreter. A device's fast logarithm has an absolute error
of 2^-22, which is too large near 1, so on a device kernels call libdevice, which the interpreter does not have."""


@triton.jit
def mix(x):
    """`mix` of gumbel.py, on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def words(a, b, token):
    """31 random bits per token, int32."""
    x = token.to(tl.uint32) * 0x9E3779B9 + a
    return (mix(mix(x) ^ b) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def exact_exp(x):
    if PLAIN:
        y = tl.exp(x)
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def gumbel(a, b, token):
    v = (words(a, b, token).to(tl.float32) + 0.5) * 4.656612873077393e-10
    v = tl.minimum(v, 0.99999994)
    if PLAIN:
        # log1p(-v) by log(1 - v): for small v, the division corrects the rounding error of 1 - v.
        u = 1.0 - v
        small = u == 1.0
        minus = tl.where(small, v, -tl.log(u) * tl.div_rn(v, tl.where(small, 1.0, 1.0 - u)))
        noise = -tl.log(minus)
    else:
        noise = -libdevice.log(-libdevice.log1p(-v))
    return noise


@triton.jit(do_not_specialize_on_alignment=["a_ptr", "b_ptr"])
def draw_kernel(
    x_ptr, a_ptr, b_ptr, floor_ptr, last_ptr, best_ptr, id_ptr, vocab, stride, chunks,
    LIMITED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    col = chunk * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + row.to(tl.int64) * stride + col, mask=col < vocab, other=float("-inf"))
    a = tl.load(a_ptr + row).to(tl.uint32, bitcast=True)
    b = tl.load(b_ptr + row).to(tl.uint32, bitcast=True)
    score = x.to(tl.float32) + gumbel(a, b, col)
    if LIMITED:
        floor = tl.load(floor_ptr + row)
        alive = (x > floor) | ((x == floor) & (col <= tl.load(last_ptr + row)))
        score = tl.where(alive, score, float("-inf"))
    score = tl.where(col < vocab, score, float("-inf"))
    best = tl.max(score, axis=0)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(id_ptr + row * chunks + chunk, tl.min(tl.where(score == best, col, NO_TOKEN), axis=0))


@triton.jit
def pick_kernel(best_ptr, id_ptr, out_ptr, vocab, chunks, COLS: tl.constexpr):
    """The lowest id among a row's best scores. For a row with NaN it is arbitrary: the sampler reports such a row."""
    row = tl.program_id(0)
    col = tl.arange(0, COLS)
    best = tl.load(best_ptr + row * chunks + col, mask=col < chunks, other=float("-inf"))
    ids = tl.load(id_ptr + row * chunks + col, mask=col < chunks, other=NO_TOKEN)
    offsets = tl.min(tl.where(best == tl.max(best, axis=0), ids, NO_TOKEN), axis=0)
    tl.store(out_ptr + row, tl.minimum(offsets, vocab - 1).to(tl.int64))


def draw(scaled_SV: Tensor, keys_2S: Tensor, cutoff: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`draw` of gumbel.py, among the tokens up to each row's last one (its logit and id, from `cutoff`)."""
    rows, vocab = scaled_SV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    x = scaled_SV if scaled_SV.stride(1) == 1 else scaled_SV.contiguous()
    best = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        draw_kernel[(rows, chunks)](
            x, keys_2S[0].contiguous(), keys_2S[1].contiguous(), *(cutoff or (None, None)), best, ids, vocab,
            x.stride(0), chunks, LIMITED=cutoff is not None, COLS=CHUNK, **WIDE,
        )  # fmt: skip
        pick_kernel[(rows,)](best, ids, tokens_S, vocab, chunks, COLS=pow2(chunks))
    return tokens_S


# ------------------------------------------------------------------------------------ cutoffs


@triton.jit
def ordered(x):
    """float32 -> uint32 in the same order; -0 and 0 become equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def weight_of(x, top, WEIGHED: tl.constexpr):
    """What a token adds to a sum: its weight (top_k_top_p.py), or one."""
    if WEIGHED:
        weight = (exact_exp(x - top) * 1099511627776.0).to(tl.int64)
    else:
        weight = (x == x).to(tl.int64)
    return weight


@triton.jit
def reaching(x_ptr, vocab, top, floor, last, target, WEIGHED: tl.constexpr, COLS: tl.constexpr):
    """(logit, id) of the token at which the running sum reaches `target`; tokens in order of logit, then id.

    Only tokens up to (floor, last) count, and their sum is at least `target`; each adds its weight, or one. The kernel
    searches the logit bit by bit, in 32 passes over the row, which stays in the cache. Two more passes find the id
    among the tokens with this logit.
    """
    found = tl.zeros([1], tl.uint32)
    for step in range(32):
        bit = (tl.full([1], 1, tl.uint32) << (31 - step)).to(tl.uint32)
        tried = found | bit
        reached = tl.zeros([1], tl.int64)
        for start in range(0, vocab, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf"))
            inside = (x > floor) | ((x == floor) & (col <= last))
            inside = inside & (ordered(x) >= tried) & (col < vocab)
            reached += tl.sum(tl.where(inside, weight_of(x, top, WEIGHED), 0), axis=0)
        found = tl.where(reached >= target, tried, found)
    bits = tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF)
    logit = tl.max(bits.to(tl.float32, bitcast=True), axis=0)
    above = tl.zeros([1], tl.int64)
    for start in range(0, vocab, COLS):
        col = start + tl.arange(0, COLS)
        x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf"))
        above += tl.sum(tl.where(x > logit, weight_of(x, top, WEIGHED), 0), axis=0)
    each = tl.maximum(weight_of(tl.zeros([1], tl.float32) + logit, top, WEIGHED), 1)
    wanted_here = tl.max((target - above + each - 1) // each, axis=0)
    seen = tl.zeros([1], tl.int64)
    found_id = tl.full([COLS], NO_TOKEN, tl.int32)
    for start in range(0, vocab, COLS):
        col = start + tl.arange(0, COLS)
        x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf"))
        same = ((x == logit) & (col < vocab)).to(tl.int64)
        place = seen + tl.cumsum(same, axis=0)
        found_id = tl.where((same > 0) & (place == wanted_here), col, found_id)
        seen += tl.sum(same, axis=0)
    return logit, tl.min(found_id, axis=0)


@triton.jit
def cutoff_kernel(
    x_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, logit_ptr, id_ptr, vocab, stride, COLS: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    most = tl.full([COLS], float("-inf"), tl.float32)
    for start in range(0, vocab, COLS):
        col = start + tl.arange(0, COLS)
        most = tl.maximum(most, tl.load(x_ptr + col, mask=col < vocab, other=float("-inf")))
    top = tl.max(most, axis=0)
    # In float64, as top_k_top_p.py.
    floor = tl.minimum((top.to(tl.float64) + tl.load(log_min_p_ptr + row)).to(tl.float32), top)
    last = tl.full([], NO_TOKEN, tl.int32)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab):
        kth, kth_id = reaching(x_ptr, vocab, top, float("-inf"), NO_TOKEN, top_k, False, COLS)
        if kth >= floor:  # else fewer than k survive min-p
            floor = kth
            last = kth_id
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        total = tl.zeros([1], tl.int64)
        for start in range(0, vocab, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf"))
            alive = ((x > floor) | ((x == floor) & (col <= last))) & (col < vocab)
            total += tl.sum(tl.where(alive, weight_of(x, top, True), 0), axis=0)
        target = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
        target = tl.max(tl.maximum(tl.minimum(target, total), 1), axis=0)
        floor, last = reaching(x_ptr, vocab, top, floor, last, target, True, COLS)
    tl.store(logit_ptr + row, floor)
    tl.store(id_ptr + row, last.to(tl.int64))


def cutoff(
    scaled_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor, log_min_p_S: Tensor
) -> tuple[Tensor, Tensor]:
    """The last surviving token of each row, as (logits float32 [S], ids int64 [S]): `cutoff` of top_k_top_p.py.

    Args:
        scaled_SV: float32.
        top_k_S: int64, 0: no limit. top_p_S: float64. log_min_p_S: float64, -inf: no limit.
    """
    rows, vocab = scaled_SV.shape
    x = scaled_SV if scaled_SV.stride(1) == 1 else scaled_SV.contiguous()
    logits_S = torch.empty(rows, dtype=torch.float32, device=x.device)
    ids_S = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        cutoff_kernel[(rows,)](
            x,
            top_k_S,
            top_p_S,
            log_min_p_S,
            logits_S,
            ids_S,
            vocab,
            x.stride(0),
            COLS=CHUNK,
            **WIDE,
        )
    return logits_S, ids_S


# ------------------------------------------------------------------------------------ penalties


@triton.jit
def count_kernel(
    counts_ptr, tokens_ptr, rows_ptr, lengths_ptr, prompts_ptr, vocab, stride, COLS: tl.constexpr
):
    """Count how often each token was output; bit 30: the prompt has the token."""
    row = tl.program_id(0)
    place = tl.program_id(1) * COLS + tl.arange(0, COLS)
    known = place < tl.load(lengths_ptr + row)
    is_output = place >= tl.load(prompts_ptr + row)
    token = tl.load(
        tokens_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride + place, mask=known, other=0
    )
    offsets = counts_ptr + row.to(tl.int64) * vocab + token
    tl.atomic_add(offsets, 1, mask=known & is_output)
    tl.atomic_or(offsets, 1 << 30, mask=known & (is_output == 0))


@triton.jit(do_not_specialize_on_alignment=["repetition_ptr", "frequency_ptr", "presence_ptr"])
def penalize_kernel(
    x_ptr, counts_ptr, at_ptr, repetition_ptr, frequency_ptr, presence_ptr, vocab, stride, COLS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = col < vocab
    seen = tl.load(counts_ptr + row.to(tl.int64) * vocab + col, mask=mask, other=0)
    count = (seen & 0x3FFFFFFF).to(tl.float32)
    offsets = x_ptr + tl.load(at_ptr + row).to(tl.int64) * stride + col
    old = tl.load(offsets, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + row)
    new = tl.where(
        old > 0, tl.div_rn(old, tl.zeros([COLS], tl.float32) + repetition), old * repetition
    )
    new = new - tl.load(frequency_ptr + row) * count
    new = new - tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    tl.store(offsets, new, mask=mask & (seen != 0))


def penalize(
    logits_SV: Tensor,
    at_P: Tensor,
    rows_P: Tensor,
    lengths_P: Tensor,
    prompts_P: Tensor,
    penalties_3P: Tensor,
    token_ids_RL: Tensor,
    longest: int,
) -> None:
    """`Penalties` of builtin_processors.py, in place on float32 logits.

    Args:
        at_P: indices into the S rows; rows_P: the worker's rows; lengths_P, prompts_P: tokens of each row, and of its
            prompt.
        penalties_3P: float32, repetition, frequency and presence.
        longest: maximum of the lengths.
    """
    count, vocab = len(at_P), logits_SV.shape[1]
    counts_PV = torch.zeros((count, vocab), dtype=torch.int32, device=logits_SV.device)
    count_kernel[(count, triton.cdiv(longest, PIECE))](
        counts_PV, token_ids_RL, rows_P, lengths_P, prompts_P, vocab, token_ids_RL.stride(0), COLS=PIECE
    )  # fmt: skip
    penalize_kernel[(count, triton.cdiv(vocab, PIECE))](
        logits_SV, counts_PV, at_P, penalties_3P[0], penalties_3P[1], penalties_3P[2], vocab,
        logits_SV.stride(0), COLS=PIECE, **EXACT,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ scores


@triton.jit
def rank_kernel(
    x_ptr, chosen_ptr, lse_ptr, rank_ptr, vocab, stride, NORMALISE: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride
    chosen = tl.load(x_ptr + tl.load(chosen_ptr + row)).to(tl.float32)
    most = tl.full([COLS], float("-inf"), tl.float32)
    for start in range(0, vocab, COLS):
        col = start + tl.arange(0, COLS)
        x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, x)
    top = tl.max(most, axis=0)
    sums = tl.zeros([COLS], tl.float32)
    above = tl.zeros([COLS], tl.int64)
    for start in range(0, vocab, COLS):
        col = start + tl.arange(0, COLS)
        x = tl.load(x_ptr + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - top)
        above += (x > chosen).to(tl.int64)
    lse = 0.0
    if NORMALISE:
        lse = top + tl.log(tl.sum(sums, axis=0))
    tl.store(lse_ptr + row, lse)
    tl.store(rank_ptr + row, tl.sum(above, axis=0) + 1)


def rank(logits_NV: Tensor, chosen_N: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    """(logsumexp to subtract from logits, or 0 without `normalise`, float32 [N]; rank of the chosen token from 1)."""
    rows, vocab = logits_NV.shape
    x = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    lse_N = torch.empty(rows, dtype=torch.float32, device=x.device)
    ranks_N = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        rank_kernel[(rows,)](
            x, chosen_N, lse_N, ranks_N, vocab, x.stride(0), NORMALISE=normalise, COLS=CHUNK, **WIDE
        )
    return lse_N, ranks_N
