"""HQQ checkpoints: integers with a float zero point and a scale for each group of inputs or outputs.

    w = (q - zero) * scale, before the groups are laid out as the weight again

A byte of `W_q` holds the values of 8, 4, 2 or 1 bits that are a half, a quarter or an eighth of the rows apart, the first
in its highest bits; a word of 32 bits holds ten values of 3 bits likewise.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNUSED = (
    "nbits|group_size|axis|packing|unpack_view_dtype|view_as_float|quant_scale|quant_zero|compute_dtype|offload_meta"
    "|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero"
)
"""Tensors that repeat what the others show, as a pattern."""

CHUNK_ROWS = 1 << 14  # rows

BITS = {1: 8, 2: 4, 4: 2, 8: 1}
"""Values in a byte -> bits of each."""


def decode(
    packed: Tensor, scale: Tensor, zero: Tensor, shape: Tensor, dtype: torch.dtype
) -> Tensor:
    """[O, I]; `shape` is a tensor that contains these numbers."""
    outs, ins = (int(size) for size in shape)
    if packed.dtype == torch.int32:
        per, bits, top = 10, 3, 27
    else:
        per, rest = divmod(outs * ins, max(1, packed.numel()))
        if rest or per not in BITS:
            raise ValueError(f"W_q has {packed.numel()} bytes for {outs} x {ins} values")
        bits = BITS[per]
        top = 8 - bits
    rows = outs * ins // max(1, packed.shape[1])
    if not 0 <= per * len(packed) - rows < per or rows * packed.shape[1] != outs * ins:
        raise ValueError(f"W_q is {list(packed.shape)} for {outs} x {ins} values")
    if scale.shape != zero.shape or scale.shape not in ((rows, 1), (1, packed.shape[1])):
        raise ValueError(f"scale is {list(scale.shape)} and zero {list(zero.shape)}")
    w = torch.empty(per * len(packed), packed.shape[1], dtype=dtype)
    for index in range(per):
        part = slice(index * len(packed), (index + 1) * len(packed))
        codes = (packed >> (top - bits * index)) & ((1 << bits) - 1)
        w[part] = codes
    w = w[:rows]
    for start in range(0, rows, CHUNK_ROWS):  # in place, and few floats at a time
        part = slice(start, start + CHUNK_ROWS)
        own = part if len(scale) > 1 else slice(None)  # a group is a row, or a column
        w[part] = (w[part].float() - zero[own].float()) * scale[own].float()
    return w.view(outs, ins)
