"""Writing keys and values into the blocks of a cache: one program a token.

Knows slots and strides. Does not know requests. Into a cache of 8-bit floats go values divided by their head's
scale and cut off at the largest that the format has.

Shape suffixes: T tokens, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import pow2, side_by_side

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def put(cache_ptr, x, scale_ptr, at, head, mask, MOST: tl.constexpr):
    """Store x [heads, features]; MOST: the format's largest number where there are scales, else 0."""
    if MOST > 0:
        scale = tl.load(scale_ptr + head)
        x32 = x.to(tl.float32) / scale[:, None]
        x = tl.minimum(tl.maximum(x32, -MOST), MOST)
    tl.store(cache_ptr + at, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, heads, size_k, size_v,
    stride_kt, stride_kh, stride_vt, stride_vh, block_size,
    MOST: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS)
        d = tl.arange(0, D)
        e = tl.arange(0, E)
        line = ((slot // block_size) * heads + head) * block_size + slot % block_size
        mask_k = (head < heads)[:, None] & (d < size_k)[None, :]
        mask_v = (head < heads)[:, None] & (e < size_v)[None, :]
        known = tl.minimum(head, heads - 1)
        k_at = k_ptr + token * stride_kt + head[:, None] * stride_kh + d[None, :]
        v_at = v_ptr + token * stride_vt + head[:, None] * stride_vh + e[None, :]
        k = tl.load(k_at, mask=mask_k, other=0.0)
        v = tl.load(v_at, mask=mask_v, other=0.0)
        put(keys_ptr, k, k_scale_ptr, line[:, None] * size_k + d[None, :], known, mask_k, MOST)
        put(values_ptr, v, v_scale_ptr, line[:, None] * size_v + e[None, :], known, mask_v, MOST)


def write(
    keys: Tensor,
    values: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    slots_T: Tensor,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
) -> None:
    """keys [blocks, K, block_size, D] and values [blocks, K, block_size, E] take tokens at their slots.

    A slot below 0 is nobody's. Scales, float32, are what cached numbers are multiplied by when they are read.
    """
    tokens, heads, size_k = k_TKD.shape
    size_v = v_TKE.shape[2]
    if not tokens:
        return
    k, v = side_by_side(k_TKD), side_by_side(v_TKE)
    write_kernel[(tokens,)](
        k, v, keys, values, slots_T, k_scale_K, v_scale_K, heads, size_k, size_v,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.shape[2],
        MOST=most(keys, k_scale_K), HEADS=pow2(heads), D=pow2(size_k), E=pow2(size_v),
    )  # fmt: skip


def most(cache: Tensor, scale_K: Tensor | None) -> float:
    """The largest number of a cache that has scales; 0: it has none."""
    return float(torch.finfo(cache.dtype).max) if scale_K is not None else 0.0
