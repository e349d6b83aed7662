"""Norms, gated activations and rotation in Triton.

Knows the arithmetic of `ops/reference.py`: kernels round to the tensors' dtype where the reference does. Does not know
layers. A program sums a whole row in one block, whose shape depends only on the row's length, so a row's bits do not
depend on the number of rows.

Shape suffixes: T tokens, D features, H heads, P pairs, I inner features. In kernels: R rows, COLS columns of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import reference
from quire.ops.triton import (  # noqa: F401  (they register their kernels)
    experts,
    lora,
    packed_attention,
    recurrent,
)
from quire.ops.triton.launch import pow2, runs_on, side_by_side

ELEMENTS = 1024  # of a program with several short rows
WIDEST = 1 << 16  # elements of the longest row that one program can hold


@triton.jit
def normed(x, w, size, eps, HAS_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr):
    """RMS norm of x [R, D], which is zero beyond `size`, times w [D]; in x's dtype."""
    x32 = x.to(tl.float32)
    mean = tl.sum(x32 * x32, axis=1) / size
    y = x32 * (1.0 / tl.sqrt(mean + eps))[:, None]
    if HAS_WEIGHT:
        if PLUS_ONE:
            out = (y * (1.0 + w.to(tl.float32))[None, :]).to(x.dtype)
        else:
            rounded = y.to(x.dtype).to(tl.float32)
            out = (rounded * w.to(tl.float32)[None, :]).to(x.dtype)
    else:
        out = y.to(x.dtype)
    return out


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr, w_ptr, out_ptr, rows, heads, size, stride_t, stride_h, eps,
    HAS_WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.arange(0, D)
    mask = (row < rows)[:, None] & (col < size)[None, :]
    start = (row // heads).to(tl.int64) * stride_t + (row % heads) * stride_h
    x = tl.load(x_ptr + start[:, None] + col[None, :], mask=mask, other=0.0)
    w = x
    if HAS_WEIGHT:
        w = tl.load(w_ptr + col, mask=col < size, other=0.0)
    out = normed(x, w, size, eps, HAS_WEIGHT, PLUS_ONE)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * size + col[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, rows, size, eps, PLUS_ONE: tl.constexpr, R: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.arange(0, D)
    mask = (row < rows)[:, None] & (col < size)[None, :]
    offsets = row.to(tl.int64)[:, None] * size + col[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    total = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
    w = tl.load(w_ptr + col, mask=col < size, other=0.0)
    tl.store(residual_ptr + offsets, total, mask=mask)
    tl.store(x_ptr + offsets, normed(total, w, size, eps, True, PLUS_ONE), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, size, pairs, stride_t, stride_h,
    INTERLEAVED: tl.constexpr, R: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    pair = tl.arange(0, P)
    mask = (row < rows)[:, None] & (pair < pairs)[None, :]
    token = (row // heads).to(tl.int64)
    x_at = x_ptr + (token * stride_t + (row % heads) * stride_h)[:, None]
    out_at = out_ptr + row.to(tl.int64)[:, None] * size
    angle_at = token[:, None] * pairs + pair[None, :]
    cos = tl.load(cos_ptr + angle_at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle_at, mask=mask, other=0.0)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + pairs
    a = tl.load(x_at + first[None, :], mask=mask, other=0.0)
    b = tl.load(x_at + second[None, :], mask=mask, other=0.0)
    a32 = a.to(tl.float32)
    b32 = b.to(tl.float32)
    tl.store(out_at + first[None, :], (a32 * cos - b32 * sin).to(a.dtype), mask=mask)
    tl.store(out_at + second[None, :], (b32 * cos + a32 * sin).to(a.dtype), mask=mask)
    if REST > 0:
        col = 2 * pairs + tl.arange(0, REST)
        inside = (row < rows)[:, None] & (col < size)[None, :]
        passed = tl.load(x_at + col[None, :], mask=inside, other=0.0)
        tl.store(out_at + col[None, :], passed, mask=inside)


@triton.jit
def gated_kernel(x_ptr, out_ptr, inner, stride_t, ACT: tl.constexpr, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = col < inner
    gate = tl.load(x_ptr + token * stride_t + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + token * stride_t + inner + col, mask=mask, other=0.0)
    g = gate.to(tl.float32)
    if ACT == "silu":
        act = g / (1.0 + tl.exp(-g))
    elif ACT == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, which keeps precision for negative u.
        act = g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        act = 0.5 * g * (1.0 + tl.erf(0.7071067811865476 * g))
    rounded = act.to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * inner + col, (rounded * up.to(tl.float32)).to(gate.dtype), mask=mask)


# ---------------------------------------------------------------------------------------- as ops


def _as_heads(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x [T, D] or [T, H, D] -> (x with contiguous features, T, H, stride of T, stride of H)."""
    x = side_by_side(x)
    if x.dim() == 2:
        return x, x.shape[0], 1, x.stride(0), 0
    if x.dim() != 3:
        x = x.contiguous().view(-1, 1, x.shape[-1])
    return x, x.shape[0], x.shape[1], x.stride(0), x.stride(1)


@reference.rms_norm.on("triton")
def rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    size = x_TD.shape[-1]
    if not runs_on(x_TD) or size > WIDEST or not x_TD.numel():
        return reference.rms_norm.reference(x_TD, weight_D, eps, plus_one)
    x, tokens, heads, stride_t, stride_h = _as_heads(x_TD)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    rows, block = tokens * heads, pow2(size)
    per = max(1, ELEMENTS // block)
    rms_norm_kernel[(triton.cdiv(rows, per),)](
        x, x if weight_D is None else weight_D, out_TD, rows, heads, size, stride_t, stride_h, eps,
        HAS_WEIGHT=weight_D is not None, PLUS_ONE=plus_one, R=per, D=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return out_TD


@reference.add_rms_norm.on("triton")
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Overwrites both inputs: x with the norm, the residual with the sum."""
    whole = x_TD.is_contiguous() and residual_TD.is_contiguous()
    size = x_TD.shape[-1]
    if not runs_on(x_TD) or not whole or size > WIDEST or x_TD.dtype != residual_TD.dtype:
        return reference.add_rms_norm.reference(x_TD, residual_TD, weight_D, eps, plus_one)
    rows, block = x_TD.numel() // size, pow2(size)
    per = max(1, ELEMENTS // block)
    if rows:
        add_rms_norm_kernel[(triton.cdiv(rows, per),)](
            x_TD, residual_TD, weight_D, rows, size, eps, PLUS_ONE=plus_one, R=per, D=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return x_TD, residual_TD


@reference.rotate.on("triton")
def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool = False) -> Tensor:
    if not runs_on(x_THD) or x_THD.dim() != 3 or not x_THD.numel():
        return reference.rotate.reference(x_THD, cos_TP, sin_TP, interleaved)
    x, tokens, heads, stride_t, stride_h = _as_heads(x_THD)
    size, pairs = x.shape[-1], cos_TP.shape[1]
    out_THD = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, rest = pow2(pairs), size - 2 * pairs
    per = max(1, ELEMENTS // (2 * block))
    rotate_kernel[(triton.cdiv(tokens * heads, per),)](
        x, cos_TP.contiguous(), sin_TP.contiguous(), out_THD, tokens * heads, heads, size, pairs,
        stride_t, stride_h, INTERLEAVED=interleaved, R=per, P=block, REST=pow2(rest) if rest else 0,
    )  # fmt: skip
    return out_THD


def _gated(x_TI2: Tensor, act: str) -> Tensor:
    x = side_by_side(x_TI2)
    inner = x.shape[1] // 2
    out_TI = torch.empty((x.shape[0], inner), dtype=x.dtype, device=x.device)
    block = min(pow2(inner), ELEMENTS)
    gated_kernel[(x.shape[0], triton.cdiv(inner, block))](
        x, out_TI, inner, x.stride(0), ACT=act, COLS=block
    )
    return out_TI


@reference.silu_and_mul.on("triton")
def silu_and_mul(x_TI2: Tensor) -> Tensor:
    if not runs_on(x_TI2) or x_TI2.dim() != 2 or not x_TI2.numel():
        return reference.silu_and_mul.reference(x_TI2)
    return _gated(x_TI2, "silu")


@reference.gelu_and_mul.on("triton")
def gelu_and_mul(x_TI2: Tensor, tanh: bool = False) -> Tensor:
    if not runs_on(x_TI2) or x_TI2.dim() != 2 or not x_TI2.numel():
        return reference.gelu_and_mul.reference(x_TI2, tanh)
    return _gated(x_TI2, "gelu_tanh" if tanh else "gelu")


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16
