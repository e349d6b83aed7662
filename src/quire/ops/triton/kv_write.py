"""KV cache write: keys and values of new tokens to their slots, one program per token.

Knows slots and strides. Does not know requests. For an 8-bit cache it quantizes each vector with its own scale, bit for
bit as `attention/kv_quantization.py` defines.

Shape suffixes: T tokens, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import EXACT, pow2, side_by_side


@triton.jit
def put(
    cache_ptr,
    scale_ptr,
    x,
    line,
    features,
    size,
    mask,
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
    LESS,
):
    """Store x [heads, features] at lines of a cache; TOP: its largest code, 0 if the cache is not quantized."""
    if TOP > 0:
        x = x.to(tl.float32)
        most = tl.max(tl.abs(x), axis=1)
        factor = tl.where(most > 1e-30, tl.div_rn(most * 0.0 + TOP, tl.maximum(most, 1e-30)), 0.0)
        x = x * factor[:, None]
        if WHOLE:
            # To the nearest integer, ties to even: above 2^23 a float32 has no fraction.
            x = (x + 12582912.0) - 12582912.0
        known = tl.max(mask.to(tl.int32), axis=1) > 0
        tl.store(scale_ptr + line, tl.div_rn(most, most * 0.0 + TOP) * LESS, mask=known)
    offsets = line[:, None] * size + features[None, :]
    tl.store(cache_ptr + offsets, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, heads, size_k, size_v,
    stride_kt, stride_kh, stride_vt, stride_vh, block_size, less,
    LATENT: tl.constexpr, TOP: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.arange(0, HEADS)
        d = tl.arange(0, D)
        e = tl.arange(0, E)
        line = ((slot // block_size) * heads + head) * block_size + slot % block_size
        mask_k = (head < heads)[:, None] & (d < size_k)[None, :]
        k_at = k_ptr + token * stride_kt + head[:, None] * stride_kh + d[None, :]
        k = tl.load(k_at, mask=mask_k, other=0.0)
        put(keys_ptr, k_scale_ptr, k, line, d, size_k, mask_k, TOP, WHOLE, less)
        if not LATENT:
            mask_v = (head < heads)[:, None] & (e < size_v)[None, :]
            v_at = v_ptr + token * stride_vt + head[:, None] * stride_vh + e[None, :]
            v = tl.load(v_at, mask=mask_v, other=0.0)
            put(values_ptr, v_scale_ptr, v, line, e, size_v, mask_v, TOP, WHOLE, 1.0)


def is_latent(cache: tuple[Tensor, ...]) -> bool:
    """Whether the values are the first features of the keys (MLA)."""
    keys, values = cache[:2]
    return values.shape[3] < keys.shape[3] and values.data_ptr() == keys.data_ptr()


def write(
    cache: tuple[Tensor, ...],
    k_TKD: Tensor,
    v_TKE: Tensor,
    slots_T: Tensor,
    top: float = 0.0,
    less: float = 1.0,
) -> None:
    """Write tokens to their slots; a negative slot marks padding, which is not written.

    Args:
        cache: keys [blocks, K, block_size, D], values [blocks, K, block_size, E]; if quantized, then the scales of both
            [blocks, K, block_size]. Of a latent cache, only keys are written.
        top: the largest code of the cache's dtype; 0: the cache is not quantized.
        less: a factor on the keys' scales, for keys after the Hadamard transform (attention/kv_quantization.py).
    """
    keys, values, *scales = cache
    k_scale, v_scale = scales or (None, None)
    tokens, heads, size_k = k_TKD.shape
    size_v = v_TKE.shape[2]
    if not tokens:
        return
    k, v = side_by_side(k_TKD), side_by_side(v_TKE)
    write_kernel[(tokens,)](
        k, v, keys, values, k_scale, v_scale, slots_T, heads, size_k, size_v,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.shape[2], less,
        LATENT=is_latent(cache), TOP=top, WHOLE=keys.dtype == torch.int8, HEADS=pow2(heads), D=pow2(size_k), E=pow2(size_v),
        **EXACT,
    )  # fmt: skip
