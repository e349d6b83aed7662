"""int8 GEMM: quantize activations per token, multiply by a weight with one scale per output.

Knows codes, scales, tiles. It launches the kernels of `fp8_gemm.py`, with integer sums. Does not know layers or
checkpoints.

    y[t, o] = scale_x[t] * scale_w[o] * sum_i x[t, i] * w[o, i]  + bias[o],    x = round(127 x / max |x|)

Sums are exact in 32 bits (up to 130,000 inputs), and the rest is elementwise and never fused: y has the bits of the
definition on a CPU, for every tile, split and batch.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.triton import fp8_gemm
from quire.ops.triton.fp8_gemm import Tile, code_rows_kernel
from quire.ops.triton.launch import EXACT, side_by_side

TOP = 127.0

FEW: tuple[tuple[int, Tile], ...] = (
    # tokens up to     tile: as for fp8
    (16, Tile(16, 32, 256, 4, 4)),
    (32, Tile(32, 32, 256, 4, 4)),
)
LARGE = (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4))
ENOUGH = 128  # programs: about the number of multiprocessors of a large GPU


def tile_for(tokens: int, outs: int) -> Tile:
    """The largest tile that keeps a GPU busy and is not mostly empty. No bits depend on it."""
    for most, tile in FEW:
        if tokens <= most:
            return tile
    for tile in LARGE:
        programs = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outs, tile.outputs)
        if programs >= ENOUGH and 2 * tokens > tile.tokens:
            return tile
    return LARGE[-1]


def codes(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes [T, I], float32 scales [T]), as `quantize` in quantization/int8.py."""
    x = side_by_side(x_TI)
    tokens, size = x.shape
    codes = torch.empty((tokens, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block = min(4096, triton.next_power_of_2(size))
        code_rows_kernel[(tokens,)](x, codes, scales, size, x.stride(0), TOP=TOP, STEP=block, num_warps=8, **EXACT)  # fmt: skip
    return codes, scales


def product(
    x: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    bias_O: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    parts: int | None = None,
) -> Tensor:
    """y_TO in `dtype`, from codes and scales of both; w: int8 [O, I] and float32 [O].

    Args:
        tile, parts: override the defaults for this shape.
    """
    tile = tile or tile_for(len(x[0]), len(w[0]))
    return fp8_gemm.product(x, w, bias_O, dtype, tile=tile, parts=parts)
