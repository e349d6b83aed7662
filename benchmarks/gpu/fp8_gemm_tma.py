"""An alternative fp8 or int8 GEMM for many tokens: a persistent kernel with tensor descriptors (TMA).

Knows one kernel, with the scales of `fp8_gemm.py`. Quire does not use it, because it has not run on a GPU yet: `make
bench-gpu` times it beside the kernel in use. With a descriptor, the GPU's copy engine loads a tile, and no thread
computes addresses. A persistent program starts the loads of its next tile while it stores the last one.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.triton.fp8_gemm import FORMATS, SUMS, Tile, finished, place_of
from quire.ops.triton.launch import INTERPRETED

TILE = Tile(128, 128, 128, 8, 4)  # a separate sum for each step takes twice the registers


@triton.jit(do_not_specialize=["tokens"])
def wide_kernel(
    x_tiles, w_tiles, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, tokens, outs, ins, groups,
    SUM: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, HAS_BIAS: tl.constexpr, T: tl.constexpr,
    OUT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tokens, T) * tl.cdiv(outs, OUT)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_t, tile_o = place_of(number, tokens, outs, T, OUT)
        t_there = tl.minimum(tile_t * T + tl.arange(0, T), tokens - 1)
        o_there = tl.minimum(tile_o * OUT + tl.arange(0, OUT), outs - 1)
        acc = tl.zeros((T, OUT), SUM)
        for step in range(tl.cdiv(ins, STEP)):
            x = x_tiles.load([tile_t * T, step * STEP])
            w = w_tiles.load([tile_o * OUT, step * STEP])
            if GROUPS:
                x_scale = tl.load(x_scale_ptr + t_there * groups + step)
                w_scale = tl.load(w_scale_ptr + (o_there // HIGH) * groups + step)
                acc += tl.dot(x, w.T) * (x_scale[:, None] * w_scale[None, :])
            else:
                acc += tl.dot(x, w.T, out_dtype=SUM)
        acc = finished(acc, t_there, o_there, x_scale_ptr, w_scale_ptr, bias_ptr, GROUPS, HAS_BIAS)
        t = tile_t * T + tl.arange(0, T)
        o = tile_o * OUT + tl.arange(0, OUT)
        at = out_ptr + t.to(tl.int64)[:, None] * outs + o[None, :]
        known = (t < tokens)[:, None] & (o < outs)[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=known)


def takes(ins: int) -> bool:
    """Whether descriptors support this number of inputs: lines must start at multiples of 16 bytes."""
    return ins % 16 == 0


def product(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], bias_O: Tensor | None, dtype: torch.dtype,
    wide: int = 0, high: int = 1, tile: Tile | None = None, programs: int = 0,
) -> Tensor:  # fmt: skip
    """As `fp8_gemm.product`, with the same sums as that kernel with the same tile.

    Args:
        programs: number of programs; 0: one per multiprocessor.
    """
    (x_TI, x_scale), (w_OI, w_scale) = x, w
    (tokens, ins), outs = x_TI.shape, len(w_OI)
    out_TO = torch.empty((tokens, outs), dtype=dtype, device=x_TI.device)
    tile = tile or (TILE._replace(inputs=wide) if wide else TILE)
    programs = programs or _processors(x_TI.device)
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outs, tile.outputs)
    inside, exact = SUMS[x_TI.dtype]
    wide_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x_TI, [tile.tokens, tile.inputs]),
        TensorDescriptor.from_tensor(w_OI, [tile.outputs, tile.inputs]),
        x_scale, w_scale, bias_O, out_TO, tokens, outs, ins, triton.cdiv(ins, wide or ins),
        SUM=FORMATS[inside], GROUPS=wide > 0, HIGH=high, HAS_BIAS=bias_O is not None, T=tile.tokens, OUT=tile.outputs,
        STEP=tile.inputs, num_warps=tile.warps, num_stages=tile.stages, **exact,
    )  # fmt: skip
    return out_TO


def _processors(device: torch.device) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
