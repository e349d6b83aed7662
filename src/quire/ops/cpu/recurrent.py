"""`ops/recurrent.py` by the CPU kernels, in float32 and bfloat16, where they support the sizes; else plain torch.

Knows dtypes and strides. The results are the definitions' up to rounding, and each row's bits are its own.

Shape suffixes: as in `ops/recurrent.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.ops import recurrent
from quire.ops.cpu.bindings import Kernels, best
from quire.ops.recurrent import TILE, Gates, StateRows


def _kernels(*tensors: Tensor | None, tiled: tuple[int, ...]) -> Kernels | None:
    """The kernels, if they take these tensors, of one dtype and with contiguous features, and these sizes."""
    given = [x for x in tensors if x is not None]
    dtype = given[0].dtype
    if dtype not in (torch.bfloat16, torch.float32) or any(size % TILE for size in tiled):
        return None
    for x in given:
        heads = x.dim() == 2 or x.stride(1) == x.shape[2]
        if x.dtype != dtype or x.stride(-1) != 1 or not heads or x.numel() == 0:
            return None
    return best()


def _rows(rows: StateRows) -> tuple[Any, ...]:
    return (
        rows.rows_B.data_ptr(),
        rows.starts_B1.data_ptr(),
        len(rows.rows_B),
        _address(rows.kept_T),
    )


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@recurrent.causal_conv.on("native")
def _causal_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None,
    state_RJ1C: Tensor,
    rows: StateRows,
    activate: bool,
) -> Tensor:
    channels, taps = weight_CJ.shape
    kernels = _kernels(x_TC, weight_CJ, tiled=(channels,)) if 2 <= taps <= 4 else None
    if kernels is None or not weight_CJ.is_contiguous():
        return recurrent.causal_conv.reference(x_TC, weight_CJ, bias_C, state_RJ1C, rows, activate)
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    kernels.causal_conv(
        x_TC.data_ptr(), x_TC.stride(0), x_TC.dtype == torch.bfloat16, weight_CJ.data_ptr(), _address(bias_C),
        state_RJ1C.data_ptr(), state_RJ1C.stride(0), y_TC.data_ptr(), channels, taps, activate, *_rows(rows),
    )  # fmt: skip
    return y_TC


@recurrent.linear_recurrence.on("native")
def _linear_recurrence(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    raw_TG: Tensor,
    write_TG: Tensor | None,
    gates: Gates,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    (key_heads, size), (heads, value) = k_THK.shape[1:], v_TGV.shape[1:]
    kernels = _kernels(q_THK, k_THK, v_TGV, raw_TG, write_TG, tiled=(size, value))
    if kernels is None:
        return recurrent.linear_recurrence.reference(
            q_THK, k_THK, v_TGV, raw_TG, write_TG, gates, state, rows
        )
    out_TGV = torch.empty(v_TGV.shape)
    arguments = [(x.data_ptr(), x.stride(0)) for x in (q_THK, k_THK, v_TGV, raw_TG)]
    write = (None, 0) if write_TG is None else (write_TG.data_ptr(), write_TG.stride(0))
    kernels.linear_recurrence(
        *(each for pair in arguments for each in pair), *write, v_TGV.dtype == torch.bfloat16,
        gates.bias_G.data_ptr(), gates.a_log_G.data_ptr(), _address(gates.skip_G), gates.low, gates.high,
        state.data_ptr(), state.stride(0), out_TGV.data_ptr(), key_heads, size, heads, value, *_rows(rows),
    )  # fmt: skip
    return out_TGV


@recurrent.selective_scan.on("native")
def _selective_scan(
    x_TC: Tensor,
    step_TC: Tensor,
    a_log_CN: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    skip_C: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    channels, states = a_log_CN.shape
    kernels = _kernels(x_TC, b_TN, c_TN, tiled=(channels,))
    if kernels is None:
        return recurrent.selective_scan.reference(
            x_TC, step_TC, a_log_CN, b_TN, c_TN, skip_C, state, rows
        )
    step_TC = step_TC.contiguous()
    y_TC = torch.empty(x_TC.shape)
    kernels.selective_scan(
        x_TC.data_ptr(), x_TC.stride(0), x_TC.dtype == torch.bfloat16, step_TC.data_ptr(), a_log_CN.data_ptr(),
        b_TN.data_ptr(), b_TN.stride(0), c_TN.data_ptr(), c_TN.stride(0), skip_C.data_ptr(), state.data_ptr(),
        state.stride(0), y_TC.data_ptr(), channels, states, *_rows(rows),
    )  # fmt: skip
    return y_TC


@recurrent.decaying_sum.on("native")
def _decaying_sum(x_TC: Tensor, decay_TC: Tensor, state_RC: Tensor, rows: StateRows) -> Tensor:
    channels = x_TC.shape[1]
    kernels = _kernels(x_TC, decay_TC, tiled=(channels,)) if x_TC.dtype == torch.float32 else None
    if kernels is None:
        return recurrent.decaying_sum.reference(x_TC, decay_TC, state_RC, rows)
    x, decay, y_TC = x_TC.contiguous(), decay_TC.contiguous(), torch.empty(x_TC.shape)
    kernels.decaying_sum(
        *(each.data_ptr() for each in (x, decay, state_RC)), state_RC.stride(0), y_TC.data_ptr(), channels, *_rows(rows)
    )  # fmt: skip
    return y_TC


@recurrent.wkv.on("native")
def _wkv(
    k_TC: Tensor, v_TC: Tensor, decay_C: Tensor, first_C: Tensor, state_R3C: Tensor, rows: StateRows
) -> Tensor:
    channels = k_TC.shape[1]
    kernels = _kernels(k_TC, v_TC, tiled=(channels,)) if k_TC.dtype == torch.float32 else None
    if kernels is None:
        return recurrent.wkv.reference(k_TC, v_TC, decay_C, first_C, state_R3C, rows)
    given = [x.contiguous() for x in (k_TC, v_TC, decay_C, first_C)]
    y_TC = torch.empty(k_TC.shape)
    kernels.wkv(
        *(x.data_ptr() for x in (*given, state_R3C)), state_R3C.stride(0), y_TC.data_ptr(), channels, *_rows(rows)
    )  # fmt: skip
    return y_TC


@recurrent.gated_rms_norm.on("native")
def _gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    kernels = _kernels(gate_TD, tiled=(size,))
    if kernels is None or x_TD.dtype != torch.float32 or not x_TD.is_contiguous():
        return recurrent.gated_rms_norm.reference(x_TD, gate_TD, weight, eps, size, gate_first)
    tokens, features = x_TD.shape
    y_TD = torch.empty(x_TD.shape, dtype=gate_TD.dtype)
    kernels.gated_rms_norm(
        x_TD.data_ptr(), gate_TD.data_ptr(), gate_TD.stride(0), gate_TD.dtype == torch.bfloat16, weight.data_ptr(),
        0 if len(weight) == size else size, y_TD.data_ptr(), tokens, features // size, size, eps, gate_first,
    )  # fmt: skip
    return y_TD
