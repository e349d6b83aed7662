"""Floats of 4 and 8 bits with a scale for each block of inputs: NVFP4, MXFP4 and MXFP8.

    w[o, i] = scale[o, g] * code[o, i],    g: the block of input i

A code of 4 bits (e2m1) is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign in its highest bit; a byte has two, the first in its low
half. MX scales are powers of two (e8m0: the byte less 127 is the exponent), for 32 inputs; NVFP4 scales are e4m3 for 16
inputs, times one scale of the whole weight. Sources: OCP Microscaling Formats 1.0; the files of compressed-tensors,
ModelOpt and gpt-oss.

Shape suffixes: O outputs, I inputs, G blocks, N bytes, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_FLOATS = 1 << 20  # values that are float32 at a time
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])
PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], 1)
"""Byte -> its two values, the low half's first."""


def e2m1(bytes_ON: Tensor) -> Tensor:
    """uint8 -> float32 [O, 2 N]."""
    flat = bytes_ON.view(torch.uint8).flatten().int()
    return PAIRS.to(flat.device).index_select(0, flat).view(len(bytes_ON), -1)


def e8m0(scale: Tensor) -> Tensor:
    """Exponents in bytes -> powers of two."""
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def scaled(
    codes: Tensor, scale: Tensor, values: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """`values` of the codes times the scales of their blocks. Dimensions before the last are outputs, or experts too."""
    codes_ON, scale_OG = codes.flatten(0, -2), scale.flatten(0, -2)
    if len(codes_ON) != len(scale_OG):
        raise ValueError(f"{len(codes_ON)} rows have {len(scale_OG)} rows of scales")
    rows = max(1, MAX_FLOATS // max(1, codes_ON.shape[1]))
    parts = zip(codes_ON.split(rows), scale_OG.split(rows), strict=True)
    made = [
        (values(part_ON).unflatten(1, (scale_OG.shape[1], -1)) * part_OG[..., None]).to(dtype)
        for part_ON, part_OG in parts
    ]
    return torch.cat(made).view(*codes.shape[:-1], -1)


def nvfp4(codes: Tensor, scale: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors: scales are divided by the one of the whole weight."""
    return scaled(codes, scale.float() / whole.float(), e2m1, dtype)


def nvfp4_of_modelopt(codes: Tensor, scale: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """ModelOpt: scales are multiplied by the one of the whole weight."""
    return scaled(codes, scale.float() * whole.float(), e2m1, dtype)


def mxfp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled(codes, e8m0(scale), e2m1, dtype)


def mxfp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled(codes, e8m0(scale), lambda part: part.float(), dtype)


def mxfp4_experts(blocks_EOGN: Tensor, scale_EOG: Tensor, dtype: torch.dtype) -> Tensor:
    """gpt-oss: [E, I, O], as its 16-bit checkpoint has the weights of all experts."""
    return mxfp4(blocks_EOGN.flatten(-2), scale_EOG, dtype).transpose(1, 2)
