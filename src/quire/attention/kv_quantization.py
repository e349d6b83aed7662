"""8-bit KV cache quantization: the definition, in plain torch, of codes and scales.

Knows one vector at a time, so the result depends neither on the batch, nor on chunks, nor on earlier tokens. Does not
know the owners of blocks, or how scores are summed.

    code = x * (MAX_CODE / most)             scale = most / MAX_CODE          most: the vector's largest magnitude

A few channels of a key are many times larger than the rest; one int8 step size for all channels would lose the rest.
So int8 keys and their queries are first multiplied by a Hadamard matrix (`hadamard`), which mixes channels evenly and
keeps the product of query and key, up to a factor that the key's scale absorbs. The steps of fp8 grow with the number,
and the Hadamard transform did not help there. The kernels give the same codes and scales, bit for bit.

Shape suffixes: T tokens, K key/value heads, D head size (of values: E), X any.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kvcache.specs import CacheSpec

MAX_CODE: dict[torch.dtype, float] = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}
"""The largest code of each format."""
MIN_ABS_MAX = 1e-30
"""A vector whose largest magnitude is not above this has zeros for codes."""
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Name in a CacheSpec -> torch dtype."""


class Part(NamedTuple):
    """One tensor of a layer's cache; blocks are outermost."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def parts(spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[Part, ...]:
    """Keys [blocks, K, block_size, D], values [blocks, K, block_size, E]; if quantized, then the scales of both.

    Without values (MLA), keys only.
    """
    dtype, shape = DTYPES[spec.dtype], (num_blocks, spec.num_kv_heads, block_size)
    if not spec.v_head_dim:
        return (Part((*shape, spec.head_dim), dtype),)
    found = (Part((*shape, spec.head_dim), dtype), Part((*shape, spec.v_head_dim), dtype))
    return (*found, *(Part(shape, torch.float32),) * 2) if dtype in MAX_CODE else found


def is_quantized(cache: tuple[Tensor, ...]) -> bool:
    """Whether a layer's cache is quantized."""
    return cache[0].dtype in MAX_CODE


def as_bytes(x: Tensor) -> Tensor:
    """View a quantized tensor as uint8, because torch cannot index fp8."""
    return x.view(torch.uint8) if x.dtype in MAX_CODE else x


def hadamard_size(size: int) -> int:
    """The number of channels that are mixed: the largest power of two that divides the head size."""
    return size & -size


def hadamard(x_XD: Tensor) -> Tensor:
    """In float32, each run of hadamard_size(D) channels times the Hadamard matrix of +1 and -1.

    It adds and subtracts pairs 1 apart, then 2, then 4 ...: a library's matrix product may sum in any order.
    """
    x, step = x_XD.float(), 1
    while step < hadamard_size(x.shape[-1]):
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return x


def encode(x_XD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes [X, D] and scales [X] of vectors."""
    x, top = x_XD.float(), MAX_CODE[dtype]
    most_X1 = x.abs().amax(-1, keepdim=True)
    factor_X1 = torch.full_like(most_X1, top) / most_X1  # `top / most_X1` would round twice
    x = x * torch.where(most_X1 > MIN_ABS_MAX, factor_X1, 0.0)
    return (x.round() if dtype == torch.int8 else x).to(dtype), most_X1[..., 0] / top


def encode_key(k_XD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype != torch.int8:
        return encode(k_XD, dtype)
    codes, scale_X = encode(hadamard(k_XD), dtype)
    return codes, scale_X / hadamard_size(k_XD.shape[-1])


def query(q_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """The queries, transformed to match keys of this format."""
    return hadamard(q_THD) if dtype == torch.int8 else q_THD


def write(cache: tuple[Tensor, ...], k_TKD: Tensor, v_TKE: Tensor, slots_T: Tensor) -> None:
    """Quantize new tokens into their slots."""
    keys, values, *scales = cache
    block_size = keys.shape[2]
    block_T = torch.div(slots_T, block_size, rounding_mode="floor")
    indices = (block_T, slice(None), slots_T - block_T * block_size)
    for into, scale, (codes, scale_TK) in zip(
        (keys, values),
        scales,
        (encode_key(k_TKD, keys.dtype), encode(v_TKE, values.dtype)),
        strict=True,
    ):
        as_bytes(into)[indices] = as_bytes(codes)
        scale[indices] = scale_TK
