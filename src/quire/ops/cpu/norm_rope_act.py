"""Norms, rotation, activation and attention of packed prompts by the CPU kernels, where they support the arguments; else plain torch.

Knows dtypes and strides. The kernels round where the definitions do, but sum a row in another order: results may differ
in bf16's last bit.

Shape suffixes: as in `ops/reference.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops import reference
from quire.ops.cpu import experts, lora, masked_argmax, recurrent, structs  # noqa: F401  (the first four register their kernels)
from quire.ops.cpu.bindings import best
from quire.ops.packed_attention import packed_attention


def _heads(x: Tensor) -> tuple[int, int, int] | None:
    """(rows, heads, row stride) of a tensor [T, D] or [T, H, D] with contiguous heads; None: it has another layout."""
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.numel() == 0:
        return None
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0)
    if x.dim() == 3 and x.stride(1) == x.shape[2]:
        return x.shape[0], x.shape[1], x.stride(0)
    return None


@reference.rms_norm.on("native")
def _rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    y = _norm(x_TD, weight_D, eps, structs.RMS_PLUS_ONE if plus_one else structs.RMS)
    return reference.rms_norm.reference(x_TD, weight_D, eps, plus_one) if y is None else y


@reference.layer_norm.on("native")
def _layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float, bias_D: Tensor | None = None) -> Tensor:
    y = _norm(x_TD, weight_D, eps, structs.LAYER_NORM, bias_D) if weight_D.dim() == 1 else None
    return reference.layer_norm.reference(x_TD, weight_D, eps, bias_D) if y is None else y


def _norm(
    x_TD: Tensor, weight_D: Tensor | None, eps: float, kind: int, bias_D: Tensor | None = None
) -> Tensor | None:
    kernels, layout, size = best(), _heads(x_TD), x_TD.shape[-1]
    if kernels is None or layout is None or size % 16:
        return None
    rows, heads, step = layout
    weight, bias = (None if each is None else each.data_ptr() for each in (weight_D, bias_D))
    y = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    kernels.norm(
        x_TD.data_ptr(),
        step,
        weight,
        y.data_ptr(),
        heads * size,
        rows,
        heads,
        size,
        eps,
        kind,
        bias,
    )
    return y


@reference.add_rms_norm.on("native")
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    kernels, size = best(), x_TD.shape[-1]
    plain = x_TD.is_contiguous() and residual_TD.is_contiguous() and x_TD.dim() == 2
    if kernels is None or x_TD.dtype != torch.bfloat16 or not plain or size % 16:
        return reference.add_rms_norm.reference(x_TD, residual_TD, weight_D, eps, plus_one)
    kind = structs.RMS_PLUS_ONE if plus_one else structs.RMS
    kernels.add_norm(
        x_TD.data_ptr(),
        residual_TD.data_ptr(),
        weight_D.data_ptr(),
        len(x_TD),
        size,
        eps,
        kind,
        None,
    )
    return x_TD, residual_TD


@reference.rotate.on("native")
def _rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool = False) -> Tensor:
    kernels, layout, half = best(), _heads(x_THD), cos_TP.shape[1]
    fits = x_THD.dim() == 3 and half >= 16 and 2 * half <= x_THD.shape[2]
    if kernels is None or layout is None or not fits:
        return reference.rotate.reference(x_THD, cos_TP, sin_TP, interleaved)
    rows, heads, step = layout
    size = x_THD.shape[2]
    cos_TP, sin_TP = cos_TP.contiguous(), sin_TP.contiguous()
    y = torch.empty(x_THD.shape, dtype=torch.bfloat16)
    kernels.rotate(
        x_THD.data_ptr(), step, cos_TP.data_ptr(), sin_TP.data_ptr(), y.data_ptr(), heads * size, rows, heads, size, half,
        interleaved,
    )  # fmt: skip
    return y


@reference.multiply_sigmoid.on("native")
def _multiply_sigmoid(x_TD: Tensor, gate_THD: Tensor) -> Tensor:
    kernels, (tokens, heads, size) = best(), gate_THD.shape
    fits = x_TD.is_contiguous() and gate_THD.stride(2) == 1 and size % 16 == 0 and tokens
    if kernels is None or not fits or {x_TD.dtype, gate_THD.dtype} != {torch.bfloat16}:
        return reference.multiply_sigmoid.reference(x_TD, gate_THD)
    kernels.multiply_sigmoid(
        x_TD.data_ptr(), gate_THD.data_ptr(), gate_THD.stride(0), gate_THD.stride(1), tokens, heads, size
    )  # fmt: skip
    return x_TD


@reference.scale_logits.on("native")
def _scale_logits(logits_SV: Tensor, scale: float, softcap: float | None) -> Tensor:
    kernels = best()
    if kernels is None or logits_SV.dtype != torch.bfloat16 or logits_SV.stride(-1) != 1:
        return reference.scale_logits.reference(logits_SV, scale, softcap)
    rows, width = logits_SV.shape
    kernels.scale(logits_SV.data_ptr(), logits_SV.stride(0), rows, width, scale, softcap or 0.0)
    return logits_SV


def _act_and_mul(x_TI2: Tensor, act: str) -> Tensor | None:
    kernels, inner = best(), x_TI2.shape[-1] // 2
    if kernels is None or x_TI2.dtype != torch.bfloat16 or not x_TI2.is_contiguous() or inner % 16:
        return None
    y_TI = torch.empty((*x_TI2.shape[:-1], inner), dtype=torch.bfloat16)
    kernels.act_and_mul(
        x_TI2.data_ptr(), y_TI.data_ptr(), y_TI.numel() // inner, inner, structs.ACTIVATIONS[act]
    )
    return y_TI


@reference.silu_and_mul.on("native")
def _silu_and_mul(x_TI2: Tensor) -> Tensor:
    y_TI = _act_and_mul(x_TI2, "silu")
    return reference.silu_and_mul.reference(x_TI2) if y_TI is None else y_TI


@packed_attention.on("native")
def _packed_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    starts_B1: Tensor,
    scale: float,
    window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:
    kernels, (tokens, heads, size) = best(), q_THD.shape
    steps = [layout and layout[2] for layout in map(_heads, (q_THD, k_TKD, v_TKD))]
    longest = int((starts_B1[1:] - starts_B1[:-1]).max()) if len(starts_B1) > 1 else 0
    covered = bias_HL is None or 2 * longest <= bias_HL.shape[1] + 1
    if kernels is None or None in steps or not covered:
        return packed_attention.reference(q_THD, k_TKD, v_TKD, starts_B1, scale, window, bias_HL)
    starts_B1, distances = starts_B1.int().contiguous(), 0
    if bias_HL is not None:
        bias_HL, distances = scaled_bias(bias_HL), (bias_HL.shape[1] + 1) // 2
    o_THD = torch.empty((tokens, heads, size), dtype=torch.bfloat16)
    kernels.packed_attention(
        q_THD.data_ptr(), steps[0], k_TKD.data_ptr(), steps[1], v_TKD.data_ptr(), steps[2], o_THD.data_ptr(), starts_B1.data_ptr(),
        len(starts_B1) - 1, heads, k_TKD.shape[1], size, window or 0, scale,
        None if bias_HL is None else bias_HL.data_ptr(), distances,
    )  # fmt: skip
    return o_THD


def scaled_bias(bias_HL: Tensor) -> Tensor:
    """A bias as the kernels take it: times log2(e), and 64 more numbers, which they may read."""
    return F.pad(bias_HL.float().flatten() * math.log2(math.e), (0, 64))


@reference.gelu_and_mul.on("native")
def _gelu_and_mul(x_TI2: Tensor, tanh: bool = False) -> Tensor:
    y_TI = _act_and_mul(x_TI2, "gelu_pytorch_tanh" if tanh else "gelu")
    return reference.gelu_and_mul.reference(x_TI2, tanh) if y_TI is None else y_TI
