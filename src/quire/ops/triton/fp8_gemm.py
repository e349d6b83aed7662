"""fp8 GEMM: quantize activations to e4m3, multiply by an e4m3 weight.

Knows codes and scales, and the tile for each number of tokens (`TILES`). Does not know layers or checkpoints. The
kernels also take int8 codes, whose sums are exact (`int8_gemm.py`).
Scales are per token and per output ("rows"), or per token and output for each group of inputs ("groups").

    rows     y[t, o] = scale_x[t] * scale_w[o] * sum_i x[t, i] * w[o, i]  + bias[o]
    groups   y[t, o] = sum_g scale_x[t, g] * scale_w[o / high, g] * sum_(i in g) x[t, i] * w[o, i]  + bias[o]

Tensor cores accumulate fp8 products in fewer bits than float32 has, so each tile's sum is added to a float32
accumulator: every 128 inputs with many tokens, every 256 with few. Split-K (`parts_of`) depends on the weight's shape
and the tile, and adds the parts in order.

Shape suffixes: T tokens, I inputs, O outputs, G groups of inputs, S parts of a sum (split-K).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import EXACT, side_by_side

TOP = 448.0  # the largest e4m3
CODES = torch.float8_e4m3fn
FORMATS = {torch.float32: tl.float32, torch.int32: tl.int32}
SUMS = {CODES: (torch.float32, {}), torch.int8: (torch.int32, EXACT)}
"""Dtype of codes -> dtype of their sums, and launch options: with int8, y is exact to the last bit."""


class Tile(NamedTuple):
    """The tile of one program, and its launch options."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES: tuple[tuple[int, Tile], ...] = (
    # tokens up to     tile
    (16, Tile(16, 32, 256, 4, 4)),  # memory-bound: many small programs read the weight
    (32, Tile(32, 32, 256, 4, 4)),
    (64, Tile(64, 64, 128, 4, 4)),
    (1 << 62, Tile(128, 128, 128, 8, 3)),  # compute-bound
)
FEW = 64
"""Up to this many tokens, sums may be split into parts, and torch's GEMM is not used."""
PROGRAMS = 512  # as many keep a large GPU busy
LEAST = 512  # inputs of a part, at least


def tile_for(tokens: int, wide: int = 0) -> Tile:
    """The tile for this many tokens; wide: inputs of a group, then also of the tile; 0: no groups."""
    tile = next(tile for most, tile in TILES if tokens <= most)
    return tile._replace(inputs=wide) if wide else tile


def by_torch(tokens: int, outs: int, ins: int, dtype: torch.dtype, wide: int = 0) -> bool:
    """Whether torch's scaled GEMM supports the shape and is preferred: many tokens, no groups."""
    return (
        tokens > FEW and not wide and outs % 16 == 0 and ins % 16 == 0 and dtype == torch.bfloat16
    )


def parts_of(outs: int, ins: int, tile: Tile) -> int:
    """The number of parts of each sum (split-K), so that enough programs read the weight."""
    parts = 1
    while parts * triton.cdiv(outs, tile.outputs) < PROGRAMS and ins >= 2 * parts * LEAST:
        parts *= 2
    return parts


# ------------------------------------------------------------------------------------ activations


@triton.jit
def to_codes(x):
    """float32 up to 448 in magnitude -> nearest e4m3, ties to even: the cast's result, also in the interpreter."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    half = tl.maximum(power, 0.015625) * 1572864.0  # 2^-6: smallest normal; 1.5 * 2^20
    return ((x + half) - half).to(tl.float8e4nv)


@triton.jit
def to_integers(x):
    """float32 up to 127 in magnitude -> nearest int8, ties to even."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23


@triton.jit
def code_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, size, stride, TOP: tl.constexpr, STEP: tl.constexpr
):
    """TOP: the largest code; 127: codes are int8."""
    token = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, STEP)
    most_I = tl.zeros((STEP,), tl.float32)
    for start in range(0, size, STEP):
        offsets = start + inputs
        x = tl.load(x_ptr + token * stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)
        most_I = tl.maximum(most_I, tl.abs(x))
    most = tl.max(most_I, axis=0)
    factor = tl.where(most > 1e-30, tl.div_rn(most * 0.0 + TOP, tl.maximum(most, 1e-30)), 0.0)
    tl.store(scales_ptr + token, tl.div_rn(most, most * 0.0 + TOP))
    for start in range(0, size, STEP):
        offsets = start + inputs
        x = tl.load(x_ptr + token * stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(x * factor, -TOP), TOP)
        codes = to_integers(x) if TOP == 127.0 else to_codes(x)
        tl.store(codes_ptr + token * size + offsets, codes, mask=offsets < size)


@triton.jit
def code_groups_kernel(
    x_ptr, codes_ptr, scales_ptr, size, groups, stride, G: tl.constexpr, WIDE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * G + tl.arange(0, G)
    offsets = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    x = tl.load(x_ptr + token * stride + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), axis=1)
    factor = tl.where(most > 1e-30, tl.div_rn(most * 0.0 + 448.0, tl.maximum(most, 1e-30)), 0.0)
    scale = tl.div_rn(most, most * 0.0 + 448.0)
    tl.store(scales_ptr + token * groups + group, scale, mask=group < groups)
    x = tl.minimum(tl.maximum(x * factor[:, None], -448.0), 448.0)
    tl.store(codes_ptr + token * size + offsets, to_codes(x), mask=offsets < size)


def codes(x_TI: Tensor, wide: int = 0) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [T, I], float32 scales [T], or [T, G] for groups of `wide` inputs)."""
    x = side_by_side(x_TI)
    tokens, size = x.shape
    groups = triton.cdiv(size, wide) if wide else 1
    codes = torch.empty((tokens, size), dtype=CODES, device=x.device)
    shape = (tokens, groups) if wide else (tokens,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if not tokens:
        return codes, scales
    if wide:
        each = max(1, 1024 // wide)
        code_groups_kernel[(tokens, triton.cdiv(groups, each))](
            x, codes, scales, size, groups, x.stride(0), G=each, WIDE=wide, **EXACT
        )
    else:
        block = min(4096, triton.next_power_of_2(size))
        code_rows_kernel[(tokens,)](x, codes, scales, size, x.stride(0), TOP=TOP, STEP=block, num_warps=8, **EXACT)  # fmt: skip
    return codes, scales


# ------------------------------------------------------------------------------------ products


@triton.jit
def place_of(number, tokens, outs, T: tl.constexpr, OUT: tl.constexpr):
    """Indices of a program's tile (tokens, outputs): 8 token tiles per output tile, to reuse data in the L2 cache."""
    tiles_t = tl.cdiv(tokens, T)
    first = (number // (8 * tl.cdiv(outs, OUT))) * 8
    many = tl.minimum(tiles_t - first, 8)
    inside = number % (8 * tl.cdiv(outs, OUT))
    return first + inside % many, inside // many


@triton.jit
def finished(
    acc, t_there, o_there, x_scale_ptr, w_scale_ptr, bias_ptr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Sums over all inputs -> y: multiply by the scales, unless GROUPS has done so, and add the bias."""
    if not GROUPS:
        x_scale = tl.load(x_scale_ptr + t_there)
        w_scale = tl.load(w_scale_ptr + o_there)
        acc = acc.to(tl.float32) * (x_scale[:, None] * w_scale[None, :])
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + o_there).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, tokens, outs, ins, groups, each,
    SUM: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr,
    T: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """SUM: dtype of sums. WHOLE: out is y [T, O]; else the sums [S, T, O] of parts of `each` inputs.

    EVEN: ins is a multiple of STEP.
    """
    tile_t, tile_o = place_of(tl.program_id(0), tokens, outs, T, OUT)
    part = tl.program_id(1)
    t = tile_t * T + tl.arange(0, T)
    o = tile_o * OUT + tl.arange(0, OUT)
    known = (t < tokens)[:, None] & (o < outs)[None, :]
    # Tokens and outputs beyond the end read the last one instead, and are not stored.
    t_there = tl.minimum(t, tokens - 1).to(tl.int64)
    o_there = tl.minimum(o, outs - 1).to(tl.int64)
    i = tl.arange(0, STEP)
    acc = tl.zeros((T, OUT), SUM)
    for start in range(part * each, tl.minimum((part + 1) * each, ins), STEP):
        offsets = start + i
        x_at = x_ptr + t_there[:, None] * ins + offsets[None, :]
        w_at = w_ptr + o_there[None, :] * ins + offsets[:, None]
        if EVEN:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(offsets < ins)[None, :], other=0.0)
            w = tl.load(w_at, mask=(offsets < ins)[:, None], other=0.0)
        if GROUPS:
            group = start // STEP
            x_scale = tl.load(x_scale_ptr + t_there * groups + group)
            w_scale = tl.load(w_scale_ptr + (o_there // HIGH) * groups + group)
            acc += tl.dot(x, w) * (x_scale[:, None] * w_scale[None, :])
        else:
            acc += tl.dot(x, w, out_dtype=SUM)
    if WHOLE:
        acc = finished(acc, t_there, o_there, x_scale_ptr, w_scale_ptr, bias_ptr, GROUPS, HAS_BIAS)
    line = part.to(tl.int64) * tokens + t_there
    tl.store(out_ptr + line[:, None] * outs + o[None, :], acc.to(out_ptr.dtype.element_ty), mask=known)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def fold_kernel(
    sums_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, tokens, outs, parts,
    GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Add sums [S, T, O] in order to y [T, O]. GROUPS: they are scaled already."""
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * OUT + tl.arange(0, OUT)
    known = o < outs
    acc = tl.zeros((OUT,), sums_ptr.dtype.element_ty)
    for part in range(parts):
        acc += tl.load(sums_ptr + (part * tokens + token) * outs + o, mask=known, other=0.0)
    if not GROUPS:
        w_scale = tl.load(w_scale_ptr + o, mask=known, other=0.0)
        acc = acc.to(tl.float32) * (tl.load(x_scale_ptr + token) * w_scale)
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + o, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * outs + o, acc.to(out_ptr.dtype.element_ty), mask=known)


def product(
    x: tuple[Tensor, Tensor],
    w: tuple[Tensor, Tensor],
    bias_O: Tensor | None,
    dtype: torch.dtype,
    wide: int = 0,
    high: int = 1,
    tile: Tile | None = None,
    parts: int | None = None,
) -> Tensor:
    """y_TO in `dtype`, from codes and scales of both.

    Args:
        x: codes [T, I], e4m3 or int8, and scales, as from `codes`; w: codes [O, I] and scales [O], or [O / high, G].
        wide: inputs of a group, a power of two of at least 32; 0: scales per token and output.
        tile, parts: override the defaults for this shape.
    """
    (x_TI, x_scale), (w_OI, w_scale) = x, w
    (tokens, ins), outs = x_TI.shape, len(w_OI)
    out_TO = torch.empty((tokens, outs), dtype=dtype, device=x_TI.device)
    if not tokens:
        return out_TO
    tile = tile or tile_for(tokens, wide)
    if parts is None:
        parts = parts_of(outs, ins, tile) if tokens <= FEW else 1
    each = triton.cdiv(triton.cdiv(ins, parts), tile.inputs) * tile.inputs
    parts = triton.cdiv(ins, each)
    sums, (inside, exact) = out_TO, SUMS[x_TI.dtype]
    if parts > 1:
        sums = torch.empty((parts, tokens, outs), dtype=inside, device=x_TI.device)
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(outs, tile.outputs)
    product_kernel[(tiles, parts)](
        x_TI, w_OI, x_scale, w_scale, bias_O, sums, tokens, outs, ins, triton.cdiv(ins, wide or ins), each,
        SUM=FORMATS[inside], GROUPS=wide > 0, HIGH=high, HAS_BIAS=bias_O is not None, WHOLE=parts == 1, T=tile.tokens,
        OUT=tile.outputs, STEP=tile.inputs, EVEN=ins % tile.inputs == 0, num_warps=tile.warps, num_stages=tile.stages,
        **exact,
    )  # fmt: skip
    if parts > 1:
        fold_kernel[(tokens, triton.cdiv(outs, 1024))](
            sums, x_scale, w_scale, bias_O, out_TO, tokens, outs, parts,
            GROUPS=wide > 0, HAS_BIAS=bias_O is not None, OUT=1024, **exact,
        )  # fmt: skip
    return out_TO
