"""WNA16 GEMM: weights of 4 or 8 bits in groups, times 16-bit activations.

Knows the packing of such a weight, and two ways to multiply it. Does not know layers or checkpoints.

    y[t, o] = bias[o] + sum_g scale[g, o] * sum_(i in g) x[t, i] * (q[o, i] - zero[g, o])

An integer minus its zero point is exact in 16 bits, so the kernel rounds no weight: it multiplies each group's sum by
its scale in float32. With 4 bits, a byte holds two inputs of a step, half a step apart: [O, I / 2], step after step.

    up to MANY tokens    one kernel reads the packed weight; split-K as in `fp8_gemm.py`
    more                 a kernel dequantizes the weight to 16 bits, some outputs at a time, and torch multiplies: with
                         many tokens the extra memory traffic costs little

Shape suffixes: T tokens, I inputs, O outputs, G groups of inputs, S parts of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from quire.ops.triton.fp8_gemm import FEW, Tile, fold_kernel, parts_of, place_of
from quire.ops.triton.launch import EXACT

MANY = 512  # with more tokens, the weight is dequantized first
MAX_DEQUANTIZED = 64 << 20  # weights that are dequantized at a time
STEPS = (32, 64, 128)  # inputs that a program processes at once: a group, or a part of one

TILES: tuple[tuple[int, Tile], ...] = (
    # tokens up to     tile; `inputs` is set to the weight's step
    (16, Tile(16, 64, 0, 4, 4)),
    (64, Tile(64, 64, 0, 4, 3)),
    (1 << 62, Tile(128, 64, 0, 8, 3)),
)


def step_of(group: int) -> int:
    """Inputs of a step for this group size; 0: no step divides it."""
    return next((step for step in reversed(STEPS) if group % step == 0), 0)


def packed(q_OI: Tensor, bits: int, step: int) -> Tensor:
    """The packed weight: uint8 [O, I], or [O, I / 2] with 4 bits."""
    if bits == 8:
        return q_OI.contiguous()
    low, high = q_OI.unflatten(1, (-1, 2, step // 2)).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unpacked(data: Tensor, bits: int, step: int) -> Tensor:
    """The integers of a packed weight, uint8 [O, I]."""
    if bits == 8:
        return data
    halves = data.unflatten(1, (-1, step // 2))
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)


@triton.jit
def part_of_step(acc, x_ptr, x_at, q, zero, step_mask):
    """acc + x times (integers q [inputs, outputs] minus their zero point)."""
    x = tl.load(x_ptr + x_at, mask=step_mask, other=0.0)
    w = (q.to(tl.int16) - zero[None, :]).to(x.dtype)
    return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def few_bits_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, tokens, outs, ins, steps_each, many,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, T: tl.constexpr, OUT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """`many`, `steps_each`: steps per part, per group. WHOLE: out is y [T, O]; else the sums [S, T, O] of parts."""
    tile_t, tile_o = place_of(tl.program_id(0), tokens, outs, T, OUT)
    part = tl.program_id(1)
    t = tile_t * T + tl.arange(0, T)
    o = tile_o * OUT + tl.arange(0, OUT)
    # Tokens and outputs beyond the end read the last one instead, and are not stored.
    t_there = tl.minimum(t, tokens - 1).to(tl.int64)
    o_there = tl.minimum(o, outs - 1).to(tl.int64)
    known_t = (t < tokens)[:, None]
    HALF: tl.constexpr = STEP // 2
    i = tl.arange(0, STEP)
    half = tl.arange(0, HALF)
    acc = tl.zeros((T, OUT), tl.float32)
    for step in range(part * many, tl.minimum((part + 1) * many, ins // STEP)):
        scale = tl.load(scale_ptr + step // steps_each * outs + o_there)
        zero = tl.load(zero_ptr + step // steps_each * outs + o_there).to(tl.int16)
        sums = tl.zeros((T, OUT), tl.float32)
        if BITS == 4:
            both = tl.load(w_ptr + o_there[None, :] * (ins // 2) + step * HALF + half[:, None])
            x_at = t_there[:, None] * ins + step * STEP + half[None, :]
            sums = part_of_step(sums, x_ptr, x_at, both & 15, zero, known_t)
            sums = part_of_step(sums, x_ptr, x_at + HALF, both >> 4, zero, known_t)
        else:
            q = tl.load(w_ptr + o_there[None, :] * ins + step * STEP + i[:, None])
            x_at = t_there[:, None] * ins + step * STEP + i[None, :]
            sums = part_of_step(sums, x_ptr, x_at, q, zero, known_t)
        acc += sums * scale[None, :]
    if WHOLE and HAS_BIAS:
        acc = acc + tl.load(bias_ptr + o_there).to(tl.float32)[None, :]
    line = part.to(tl.int64) * tokens + t_there
    known = known_t & (o < outs)[None, :]
    tl.store(out_ptr + line[:, None] * outs + o[None, :], acc.to(out_ptr.dtype.element_ty), mask=known)  # fmt: skip


@triton.jit
def widen_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, outs, ins, steps_each, stride, BITS: tl.constexpr, STEP: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Dequantize one step of some outputs to 16 bits: scale times (integer minus zero point), rounded once."""
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    step = tl.program_id(1)
    there = tl.minimum(o, outs - 1).to(tl.int64)
    scale = tl.load(scale_ptr + step // steps_each * stride + there)[:, None]
    zero = tl.load(zero_ptr + step // steps_each * stride + there).to(tl.float32)[:, None]
    known = (o < outs)[:, None]
    into = out_ptr + there[:, None] * ins + step * STEP
    if BITS == 4:
        i = tl.arange(0, STEP // 2)
        both = tl.load(w_ptr + there[:, None] * (ins // 2) + step * (STEP // 2) + i[None, :])
        low = ((both & 15).to(tl.float32) - zero) * scale
        high = ((both >> 4).to(tl.float32) - zero) * scale
        tl.store(into + i[None, :], low.to(out_ptr.dtype.element_ty), mask=known)
        tl.store(into + STEP // 2 + i[None, :], high.to(out_ptr.dtype.element_ty), mask=known)
    else:
        i = tl.arange(0, STEP)
        q = tl.load(w_ptr + there[:, None] * ins + step * STEP + i[None, :])
        w = (q.to(tl.float32) - zero) * scale
        tl.store(into + i[None, :], w.to(out_ptr.dtype.element_ty), mask=known)


def by_library(
    x_TI: Tensor, data: Tensor, scale_GO: Tensor, zero_GO: Tensor, bias_O: Tensor | None, step: int
) -> Tensor:
    """As `product`, but dequantizes the weight to 16 bits first, some outputs at a time, and multiplies by torch."""
    ins, outs = x_TI.shape[1], len(data)
    rows = max(1, MAX_DEQUANTIZED // ins)
    parts = []
    for start in range(0, outs, rows):
        offsets = slice(start, start + rows)
        weight = widened(
            data[offsets], scale_GO[:, offsets], zero_GO[:, offsets], step, ins, x_TI.dtype
        )
        parts.append(F.linear(x_TI, weight, None if bias_O is None else bias_O[offsets]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def product(
    x_TI: Tensor, data: Tensor, scale_GO: Tensor, zero_GO: Tensor, bias_O: Tensor | None, step: int,
    tile: Tile | None = None, parts: int | None = None,
) -> Tensor:  # fmt: skip
    """y_TO in x's dtype.

    Args:
        data: from `packed`; scale_GO: float32; zero_GO: uint8.
        tile, parts: override the defaults for this shape.
    """
    x, (tokens, ins), outs = x_TI.contiguous(), x_TI.shape, len(data)
    bits = 8 if data.shape[1] == ins else 4
    out_TO = torch.empty((tokens, outs), dtype=x.dtype, device=x.device)
    if not tokens:
        return out_TO
    tile = (tile or next(t for most, t in TILES if tokens <= most))._replace(inputs=step)
    if parts is None:
        parts = parts_of(outs, ins, tile) if tokens <= FEW else 1
    many = triton.cdiv(ins // step, parts)
    parts = triton.cdiv(ins // step, many)
    sums = out_TO
    if parts > 1:
        sums = torch.empty((parts, tokens, outs), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outs, tile.outputs)
    few_bits_kernel[(tiles, parts)](
        x, data, scale_GO, zero_GO, bias_O, sums, tokens, outs, ins, ins // len(scale_GO) // step, many,
        BITS=bits, HAS_BIAS=bias_O is not None, WHOLE=parts == 1, T=tile.tokens, OUT=tile.outputs, STEP=step,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        fold_kernel[(tokens, triton.cdiv(outs, 1024))](
            sums, None, None, bias_O, out_TO, tokens, outs, parts,
            GROUPS=True, HAS_BIAS=bias_O is not None, OUT=1024,
        )  # fmt: skip
    return out_TO


def widened(
    data: Tensor, scale_GO: Tensor, zero_GO: Tensor, step: int, ins: int, dtype: torch.dtype
) -> Tensor:
    """The weight [O, I] in 16 bits. Scales and zero points may be column slices of larger tensors."""
    outs, block = len(data), 16
    out_OI = torch.empty((outs, ins), dtype=dtype, device=data.device)
    widen_kernel[(triton.cdiv(outs, block), ins // step)](
        data, scale_GO, zero_GO, out_OI, outs, ins, ins // len(scale_GO) // step, scale_GO.stride(0),
        BITS=8 if data.shape[1] == ins else 4, STEP=step, OUT=block, **EXACT,
    )  # fmt: skip
    return out_OI
