"""`ops/recurrent.py` in Triton: a program has some channels of one row, and goes through all of the row's tokens.

Knows the arithmetic of the definitions. Does not know layers. A row's bits depend neither on other rows nor on the cuts of
its prompt. A row without tokens, of a captured graph for example, keeps its state.

Shape suffixes: as in `ops/recurrent.py`. In kernels: T tokens, C, V, N blocks of channels, values and states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import recurrent
from quire.ops.recurrent import Gates, StateRows
from quire.ops.triton.launch import EXACT, pow2, runs_on, side_by_side

CHANNELS = 128  # of a program


@triton.jit
def sigmoid_of(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus_of(x):
    """log(1 + e^x), exact for small e^x too."""
    z = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + z
    small = tl.where(u == 1.0, z, tl.log(u) * (z / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def row_of(rows_ptr, starts_ptr):
    """The row of this program, its first token, and the token after its last."""
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    return row, tl.load(starts_ptr + b).to(tl.int64), tl.load(starts_ptr + b + 1).to(tl.int64)


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, bias_ptr, state_ptr, y_ptr, rows_ptr, starts_ptr, kept_ptr, x_step, state_step, channels,
    KEEPS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, J: tl.constexpr, J2: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row, start, end = row_of(rows_ptr, starts_ptr)
    count = end - start
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < channels
    state_at = state_ptr + row * state_step + c
    for first in range(0, count, T):
        t = first + tl.arange(0, T)
        total = tl.zeros([T, C], tl.float32)
        for j in tl.static_range(J):
            offsets = t - (J - 1) + j
            new = (offsets >= 0) & (t < count)
            x = tl.load(
                x_ptr + ((start + offsets) * x_step)[:, None] + c[None, :],
                mask=new[:, None] & inside[None, :],
                other=0.0,
            )
            old = state_at[None, :] + ((offsets + J - 1) * channels)[:, None]
            x += tl.load(old, mask=(offsets < 0)[:, None] & inside[None, :], other=0.0)
            tap = tl.load(w_ptr + c * J + j, mask=inside, other=0.0).to(tl.float32)
            total += tap[None, :] * x.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ACTIVATE:
            total = total * sigmoid_of(total)
        mask = (t < count)[:, None] & inside[None, :]
        out = y_ptr + ((start + t) * channels)[:, None] + c[None, :]
        tl.store(out, total.to(y_ptr.dtype.element_ty), mask=mask)
    j = tl.arange(0, J2)
    if KEEPS:
        for t in range(count):
            to = tl.load(kept_ptr + start + t)
            offsets = t + 1 - (J - 1) + j
            one = (j < J - 1)[:, None] & inside[None, :]
            x = tl.load(
                x_ptr + ((start + offsets) * x_step)[:, None] + c[None, :],
                mask=one & (offsets >= 0)[:, None],
                other=0.0,
            )
            old = state_at[None, :] + ((offsets + J - 1) * channels)[:, None]
            x += tl.load(old, mask=one & (offsets < 0)[:, None], other=0.0)
            entry = state_ptr + to * state_step + c
            tl.store(entry[None, :] + (j * channels)[:, None], x, mask=one & (to > 0))
    offsets = count - (J - 1) + j
    kept = (j < J - 1)[:, None] & inside[None, :]
    last = tl.load(
        x_ptr + ((start + offsets) * x_step)[:, None] + c[None, :],
        mask=kept & (offsets >= 0)[:, None],
        other=0.0,
    )
    last += tl.load(
        state_at[None, :] + ((offsets + J - 1) * channels)[:, None],
        mask=kept & (offsets < 0)[:, None],
        other=0.0,
    )
    tl.debug_barrier()  # all have read the state
    tl.store(state_at[None, :] + (j * channels)[:, None], last, mask=kept)


@triton.jit
def linear_recurrence_kernel(
    q_ptr, k_ptr, v_ptr, raw_ptr, write_ptr, bias_ptr, a_log_ptr, skip_ptr, state_ptr, y_ptr, rows_ptr, starts_ptr, kept_ptr,
    q_step, k_step, v_step, raw_step, write_step, state_step, low, high, heads, key_heads, size, values,
    KEEPS: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, W: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    row, start, end = row_of(rows_ptr, starts_ptr)
    head = tl.program_id(1)
    k_at, v_at = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    k_in, v_in = k_at < size, v_at < values
    of_key = (head * key_heads // heads) * size + k_at
    of_value = head * values + v_at
    entry = state_ptr + row * state_step + head * size * values
    entry = entry + (k_at * W)[:, None] + (v_at // W * size * W + v_at % W)[None, :]
    inside = k_in[:, None] & v_in[None, :]
    s = tl.load(entry, mask=inside, other=0.0)
    bias, rate = tl.load(bias_ptr + head), tl.exp(tl.load(a_log_ptr + head))
    for t in range(start, end):
        q = tl.load(q_ptr + t * q_step + of_key, mask=k_in, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + t * k_step + of_key, mask=k_in, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * v_step + of_value, mask=v_in, other=0.0).to(tl.float32)
        raw = tl.load(raw_ptr + t * raw_step + head).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus_of(raw + bias), low), high)
        s = s * tl.exp(-rate * step)
        if DELTA:
            q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * (1.0 / tl.sqrt(size * 1.0))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
            beta = sigmoid_of(tl.load(write_ptr + t * write_step + head).to(tl.float32))
            r = beta * (v - tl.sum(s * k[:, None], 0))
        else:
            r = step * v
        s = s + k[:, None] * r[None, :]
        y = tl.sum(s * q[:, None], 0)
        if SKIP:
            y += tl.load(skip_ptr + head) * v
        tl.store(y_ptr + t * heads * values + of_value, y, mask=v_in)
        if KEEPS:
            to = tl.load(kept_ptr + t)
            tl.store(entry + (to - row) * state_step, s, mask=inside & (to > 0))
    tl.store(entry, s, mask=inside)


@triton.jit
def scan_kernel(
    x_ptr, step_ptr, a_log_ptr, b_ptr, c_ptr, skip_ptr, state_ptr, y_ptr, rows_ptr, starts_ptr, kept_ptr,
    x_step, b_step, c_step, state_step, channels, states, KEEPS: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, start, end = row_of(rows_ptr, starts_ptr)
    c, n = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, N)
    c_in, n_in = c < channels, n < states
    inside = c_in[:, None] & n_in[None, :]
    entry = state_ptr + row * state_step + (c // W * states * W + c % W)[:, None] + (n * W)[None, :]
    s = tl.load(entry, mask=inside, other=0.0)
    rate = -tl.exp(tl.load(a_log_ptr + (c * states)[:, None] + n[None, :], mask=inside, other=0.0))
    skip = tl.load(skip_ptr + c, mask=c_in, other=0.0)
    for t in range(start, end):
        x = tl.load(x_ptr + t * x_step + c, mask=c_in, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + t * channels + c, mask=c_in, other=0.0)
        b = tl.load(b_ptr + t * b_step + n, mask=n_in, other=0.0).to(tl.float32)
        out = tl.load(c_ptr + t * c_step + n, mask=n_in, other=0.0).to(tl.float32)
        s = tl.exp(step[:, None] * rate) * s + (step * x)[:, None] * b[None, :]
        y = tl.sum(s * out[None, :], 1) + skip * x
        tl.store(y_ptr + t * channels + c, y, mask=c_in)
        if KEEPS:
            to = tl.load(kept_ptr + t)
            tl.store(entry + (to - row) * state_step, s, mask=inside & (to > 0))
    tl.store(entry, s, mask=inside)


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, gate_step, w_step, groups, size, eps, GATE_FIRST: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    t, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    d = tl.arange(0, D)
    inside = d < size
    offsets = (t * groups + group) * size + d
    gate = tl.load(gate_ptr + t * gate_step + group * size + d, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    g = g * sigmoid_of(g)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if GATE_FIRST:
        x = x * g
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps))
    w = tl.load(w_ptr + group * w_step + d, mask=inside, other=0.0).to(tl.float32)
    y = (x.to(gate.dtype).to(tl.float32) * w).to(gate.dtype)
    if not GATE_FIRST:
        y = (y.to(tl.float32) * g).to(gate.dtype)
    tl.store(y_ptr + offsets, y, mask=inside)


@triton.jit
def decaying_sum_kernel(
    x_ptr, decay_ptr, state_ptr, y_ptr, rows_ptr, starts_ptr, kept_ptr, state_step, channels,
    KEEPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row, start, end = row_of(rows_ptr, starts_ptr)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < channels
    s = tl.load(state_ptr + row * state_step + c, mask=inside, other=0.0)
    for t in range(start, end):
        offsets = t * channels + c
        s = tl.load(decay_ptr + offsets, mask=inside, other=0.0) * s
        s += tl.load(x_ptr + offsets, mask=inside, other=0.0)
        tl.store(y_ptr + offsets, s, mask=inside)
        if KEEPS:
            to = tl.load(kept_ptr + t)
            tl.store(state_ptr + to * state_step + c, s, mask=inside & (to > 0))
    tl.store(state_ptr + row * state_step + c, s, mask=inside)


@triton.jit
def wkv_kernel(
    k_ptr, v_ptr, decay_ptr, first_ptr, state_ptr, y_ptr, rows_ptr, starts_ptr, kept_ptr, state_step, channels,
    KEEPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row, start, end = row_of(rows_ptr, starts_ptr)
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < channels
    entry = state_ptr + row * state_step + c
    total = tl.load(entry, mask=inside, other=0.0)
    weights = tl.load(entry + channels, mask=inside, other=0.0)
    top = tl.load(entry + 2 * channels, mask=inside, other=0.0)
    decay = tl.exp(tl.load(decay_ptr + c, mask=inside, other=0.0))
    bonus = tl.load(first_ptr + c, mask=inside, other=0.0)
    for t in range(start, end):
        k = tl.load(k_ptr + t * channels + c, mask=inside, other=0.0)
        v = tl.load(v_ptr + t * channels + c, mask=inside, other=0.0)
        top = tl.where(weights == 0.0, -1e30, top)
        most = tl.maximum(top, k + bonus)
        old, new = tl.exp(top - most), tl.exp(k + bonus - most)
        y = (old * total + new * v) / (old * weights + new)
        tl.store(y_ptr + t * channels + c, y, mask=inside)
        top = top - decay
        most = tl.maximum(top, k)
        old, new = tl.exp(top - most), tl.exp(k - most)
        total, weights, top = old * total + new * v, old * weights + new, most
        if KEEPS:
            to = tl.load(kept_ptr + t)
            copy, here = entry + (to - row) * state_step, inside & (to > 0)
            tl.store(copy, total, mask=here)
            tl.store(copy + channels, weights, mask=here)
            tl.store(copy + 2 * channels, top, mask=here)
    tl.store(entry, total, mask=inside)
    tl.store(entry + channels, weights, mask=inside)
    tl.store(entry + 2 * channels, top, mask=inside)


# ---------------------------------------------------------------------------------------- as ops


def _rows(rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.rows_B, rows.starts_B1, rows.rows_B if rows.kept_T is None else rows.kept_T


def _in_heads(x_THK: Tensor) -> Tensor:
    """The tensor, with contiguous heads."""
    return (
        x_THK if x_THK.stride(1) == x_THK.shape[2] and x_THK.stride(2) == 1 else x_THK.contiguous()
    )


@recurrent.causal_conv.on("triton")
def causal_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None,
    state_RJ1C: Tensor,
    rows: StateRows,
    activate: bool,
) -> Tensor:
    if not runs_on(x_TC):
        return recurrent.causal_conv.reference(x_TC, weight_CJ, bias_C, state_RJ1C, rows, activate)
    x_TC, weight_CJ = side_by_side(x_TC), weight_CJ.contiguous()
    channels, taps = weight_CJ.shape
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    conv_kernel[(len(rows.rows_B), triton.cdiv(channels, CHANNELS))](
        x_TC, weight_CJ, weight_CJ if bias_C is None else bias_C, state_RJ1C, y_TC, *_rows(rows), x_TC.stride(0),
        state_RJ1C.stride(0), channels, KEEPS=rows.kept_T is not None, HAS_BIAS=bias_C is not None, ACTIVATE=activate, J=taps, J2=pow2(taps - 1), T=8,
        C=CHANNELS, **EXACT,
    )  # fmt: skip
    return y_TC


@recurrent.linear_recurrence.on("triton")
def linear_recurrence(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    raw_TG: Tensor,
    write_TG: Tensor | None,
    gates: Gates,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    if not runs_on(v_TGV):
        return recurrent.linear_recurrence.reference(
            q_THK, k_THK, v_TGV, raw_TG, write_TG, gates, state, rows
        )
    q, k, v = _in_heads(q_THK), _in_heads(k_THK), _in_heads(v_TGV)
    raw, write = side_by_side(raw_TG), side_by_side(raw_TG if write_TG is None else write_TG)
    (key_heads, size), (heads, values) = k.shape[1:], v.shape[1:]
    out_TGV = torch.empty(v.shape, device=v.device)
    block = min(pow2(values), 32)
    linear_recurrence_kernel[(len(rows.rows_B), heads, triton.cdiv(values, block))](
        q, k, v, raw, write, gates.bias_G, gates.a_log_G, gates.bias_G if gates.skip_G is None else gates.skip_G,
        state, out_TGV, *_rows(rows), q.stride(0), k.stride(0), v.stride(0), raw.stride(0), write.stride(0), state.stride(0),
        gates.low, gates.high, heads, key_heads, size, values, KEEPS=rows.kept_T is not None, DELTA=write_TG is not None,
        SKIP=gates.skip_G is not None, W=state.shape[-1], K=pow2(size), V=block, **EXACT,
    )  # fmt: skip
    return out_TGV


@recurrent.selective_scan.on("triton")
def selective_scan(
    x_TC: Tensor,
    step_TC: Tensor,
    a_log_CN: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    skip_C: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    if not runs_on(x_TC):
        return recurrent.selective_scan.reference(
            x_TC, step_TC, a_log_CN, b_TN, c_TN, skip_C, state, rows
        )
    x, b, c = side_by_side(x_TC), side_by_side(b_TN), side_by_side(c_TN)
    channels, states = a_log_CN.shape
    y_TC, block = torch.empty(x.shape, device=x.device), 64
    scan_kernel[(len(rows.rows_B), triton.cdiv(channels, block))](
        x, step_TC.contiguous(), a_log_CN, b, c, skip_C, state, y_TC, *_rows(rows), x.stride(0), b.stride(0), c.stride(0),
        state.stride(0), channels, states, KEEPS=rows.kept_T is not None, W=state.shape[-1], C=block, N=pow2(states), **EXACT,
    )  # fmt: skip
    return y_TC


@recurrent.gated_rms_norm.on("triton")
def gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    if not runs_on(x_TD) or not x_TD.numel():
        return recurrent.gated_rms_norm.reference(x_TD, gate_TD, weight, eps, size, gate_first)
    x, gate = x_TD.float().contiguous(), side_by_side(gate_TD)
    y_TD, groups = torch.empty(x.shape, dtype=gate.dtype, device=x.device), x.shape[1] // size
    gated_norm_kernel[(len(x) * groups,)](
        x, gate, weight, y_TD, gate.stride(0), 0 if len(weight) == size else size, groups, size, eps,
        GATE_FIRST=gate_first, D=pow2(size), **EXACT,
    )  # fmt: skip
    return y_TD


@recurrent.decaying_sum.on("triton")
def decaying_sum(x_TC: Tensor, decay_TC: Tensor, state_RC: Tensor, rows: StateRows) -> Tensor:
    if not runs_on(x_TC):
        return recurrent.decaying_sum.reference(x_TC, decay_TC, state_RC, rows)
    x, decay = x_TC.contiguous(), decay_TC.contiguous()
    y_TC, channels = torch.empty_like(x), x.shape[1]
    decaying_sum_kernel[(len(rows.rows_B), triton.cdiv(channels, CHANNELS))](
        x,
        decay,
        state_RC,
        y_TC,
        *_rows(rows),
        state_RC.stride(0),
        channels,
        KEEPS=rows.kept_T is not None,
        C=CHANNELS,
        **EXACT,
    )
    return y_TC


@recurrent.wkv.on("triton")
def wkv(
    k_TC: Tensor, v_TC: Tensor, decay_C: Tensor, first_C: Tensor, state_R3C: Tensor, rows: StateRows
) -> Tensor:
    if not runs_on(k_TC):
        return recurrent.wkv.reference(k_TC, v_TC, decay_C, first_C, state_R3C, rows)
    k, v = k_TC.contiguous(), v_TC.contiguous()
    y_TC, channels = torch.empty_like(k), k.shape[1]
    wkv_kernel[(len(rows.rows_B), triton.cdiv(channels, CHANNELS))](
        k, v, decay_C, first_C, state_R3C, y_TC, *_rows(rows), state_R3C.stride(0), channels, KEEPS=rows.kept_T is not None, C=CHANNELS, **EXACT
    )  # fmt: skip
    return y_TC
