"""One fused kernel between the QKV projection and attention: QK-norm, RoPE, KV cache write.

Knows the arithmetic of `ops/reference.py`, roundings included, and the layout of the KV cache. Does not know layers.
One program handles all heads of a token, and reads queries, keys and values once.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size (of values: E), P pairs of features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import pow2, side_by_side


class Norms(NamedTuple):
    """RMS norms of each head's query and key."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float
    plus_one: bool


@triton.jit
def normed(x, w_ptr, offsets, mask, r, NORMED: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Norm of a part of each head's features: float32, rounded to x's dtype."""
    y = x.to(tl.float32)
    if NORMED:
        w = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = y * r[:, None]
        if PLUS_ONE:
            y = (y * (1.0 + w)[None, :]).to(x.dtype).to(tl.float32)
        else:
            y = (y.to(x.dtype).to(tl.float32) * w[None, :]).to(x.dtype).to(tl.float32)
    return y


@triton.jit
def turn(
    x_ptr, w_ptr, out_ptr, cos, sin, head, heads, size, pairs, stride_h, out_line, eps,
    NORMED: tl.constexpr, PLUS_ONE: tl.constexpr, INTERLEAVED: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of one token, from x to line `out_line` of out (a line has `size` features)."""
    pair = tl.arange(0, P)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + pairs
    known = head < heads
    rotated = pair < pairs
    mask = known[:, None] & rotated[None, :]
    row = x_ptr + (head * stride_h)[:, None]
    a = tl.load(row + first[None, :], mask=mask, other=0.0)
    b = tl.load(row + second[None, :], mask=mask, other=0.0)
    squares = tl.sum(a.to(tl.float32) * a.to(tl.float32), axis=1)
    squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), axis=1)
    into = out_ptr + (out_line * size)[:, None]
    if REST > 0:
        more = 2 * pairs + tl.arange(0, REST)
        left = known[:, None] & (more < size)[None, :]
        c = tl.load(row + more[None, :], mask=left, other=0.0)
        squares += tl.sum(c.to(tl.float32) * c.to(tl.float32), axis=1)
    r = 1.0 / tl.sqrt(squares / size + eps)
    a32 = normed(a, w_ptr, first, rotated, r, NORMED, PLUS_ONE)
    b32 = normed(b, w_ptr, second, rotated, r, NORMED, PLUS_ONE)
    dtype = out_ptr.dtype.element_ty
    tl.store(into + first[None, :], (a32 * cos - b32 * sin).to(a.dtype).to(dtype), mask=mask)
    tl.store(into + second[None, :], (b32 * cos + a32 * sin).to(a.dtype).to(dtype), mask=mask)
    if REST > 0:
        passed = normed(c, w_ptr, more, more < size, r, NORMED, PLUS_ONE)
        tl.store(into + more[None, :], passed.to(c.dtype).to(dtype), mask=left)


@triton.jit
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, out_ptr, keys_ptr, values_ptr, slots_ptr,
    heads, kv_heads, size, size_v, pairs, block_size, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    NORMED: tl.constexpr, PLUS_ONE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, P: tl.constexpr, REST: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, P)
    cos = tl.load(cos_ptr + token * pairs + pair, mask=pair < pairs, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * pairs + pair, mask=pair < pairs, other=0.0)[None, :]
    head = tl.arange(0, HEADS)
    turn(
        q_ptr + token * stride_qt, qw_ptr, out_ptr, cos, sin, head, heads, size, pairs, stride_qh,
        token * heads + head, eps, NORMED, PLUS_ONE, INTERLEAVED, P, REST,
    )  # fmt: skip
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.arange(0, KV_HEADS)
        line = ((slot // block_size) * kv_heads + kv_head) * block_size + slot % block_size
        turn(
            k_ptr + token * stride_kt, kw_ptr, keys_ptr, cos, sin, kv_head, kv_heads, size, pairs, stride_kh,
            line, eps, NORMED, PLUS_ONE, INTERLEAVED, P, REST,
        )  # fmt: skip
        e = tl.arange(0, E)
        mask = (kv_head < kv_heads)[:, None] & (e < size_v)[None, :]
        v_at = v_ptr + token * stride_vt + kv_head[:, None] * stride_vh + e[None, :]
        v = tl.load(v_at, mask=mask, other=0.0)
        into = values_ptr + line[:, None] * size_v + e[None, :]
        tl.store(into, v.to(values_ptr.dtype.element_ty), mask=mask)


def prepare(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    norms: Norms | None,
    cache: tuple[Tensor, ...],
    slots_T: Tensor,
) -> Tensor:
    """Return normed and rotated queries, [T, H, D]; write such keys, and the values, to their slots of the cache.

    Args:
        cache: keys [blocks, K, block_size, D] and values [blocks, K, block_size, E], not quantized.
        slots_T: a negative slot marks padding, which is not written.
    """
    tokens, heads, size = q_THD.shape
    keys, values = cache
    q, k, v = (side_by_side(x) for x in (q_THD, k_TKD, v_TKE))
    cos_TP, sin_TP = (x.contiguous() for x in angles)
    pairs, rest = cos_TP.shape[1], size - 2 * cos_TP.shape[1]
    out_THD = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    if tokens:
        prepare_kernel[(tokens,)](
            q, k, v, None if norms is None else norms.q_weight_D, None if norms is None else norms.k_weight_D,
            cos_TP, sin_TP, out_THD, keys, values, slots_T, heads, k.shape[1], size, v.shape[2], pairs,
            keys.shape[2], 0.0 if norms is None else norms.eps,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            NORMED=norms is not None, PLUS_ONE=norms is not None and norms.plus_one, INTERLEAVED=interleaved,
            HEADS=pow2(heads), KV_HEADS=pow2(k.shape[1]), P=pow2(pairs), REST=pow2(rest) if rest else 0,
            E=pow2(v.shape[2]),
        )  # fmt: skip
    return out_THD
