"""Ops of recurrent layers in plain torch: the definitions. Each reads and writes one state for each row.

Every recurrence runs token by token in float32, in every step: its bits depend neither on how a prompt was cut into
steps nor on the other rows (decision 58). A state continues from what is at the row's index; rows are stride(0) apart.

Nonlinear functions are made of exp and log1p alone: torch computes others (silu, softplus) with other bits at the end of
a tensor than in its middle.

Shape suffixes: T tokens of this step, B rows of this step, B1 = B + 1, R rows of the worker, C channels, J taps of a
convolution (J1 = J - 1), H key heads, K size of a key, G value heads, V size of a value, N states of a channel, W
channels or features of a tile, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.dispatch import op

TILE = 16
"""Features that kernels compute at once."""


class StateRows(NamedTuple):
    """Which tokens of a step belong to which row: row rows_B[b] has the tokens starts_B1[b] : starts_B1[b + 1].

    The state after token t is also copied to entry kept_T[t]; 0: to none, since entry 0 belongs to a row.
    """

    rows_B: Tensor  # int64
    starts_B1: Tensor  # int32
    kept_T: Tensor | None = None  # int64; None: all 0


class Gates(NamedTuple):
    """How the inputs of a recurrence decay, by value head, in float32.

    With s = softplus(raw + bias), clamped to `low`..`high`, a state decays by exp(-exp(a_log) * s).
    """

    bias_G: Tensor
    a_log_G: Tensor
    skip_G: Tensor | None = None  # the output has skip * v added
    low: float = 0.0
    high: float = float("inf")


def tile_width(features: int) -> int:
    return TILE if features % TILE == 0 else features


def recurrence_shape(value_heads: int, key_size: int, value_size: int) -> tuple[int, ...]:
    """Shape of a row's state of `linear_recurrence`: tiles of values, which are contiguous."""
    width = tile_width(value_size)
    return value_heads, value_size // width, key_size, width


def scan_shape(channels: int, states: int) -> tuple[int, ...]:
    """Shape of a row's state of `selective_scan`."""
    width = tile_width(channels)
    return channels // width, states, width


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def _by_token(rows: StateRows) -> Iterator[tuple[list[int], list[int]]]:
    """For each token of the longest row: the indices in B of the rows that have it, and its indices in T."""
    starts = rows.starts_B1.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    for t in range(max(lengths, default=0)):
        inside = [b for b, length in enumerate(lengths) if length > t]
        yield inside, [starts[b] + t for b in inside]


def _put(state: Tensor, entries: Tensor, rows: StateRows) -> None:
    """Store the entries of the rows that have tokens."""
    has = rows.starts_B1.diff() > 0
    state[rows.rows_B[has]] = entries[has]


def _keep(state: Tensor, entries: Tensor, tokens: list[int], rows: StateRows) -> None:
    """Copy the states after these tokens where the step keeps them."""
    if rows.kept_T is not None:
        kept = rows.kept_T[tokens]
        state[kept[kept > 0]] = entries[kept > 0]


@op
def causal_conv(
    x_TC: Tensor,
    weight_CJ: Tensor,
    bias_C: Tensor | None,
    state_RJ1C: Tensor,
    rows: StateRows,
    activate: bool,
) -> Tensor:
    """y_t = sum over j of weight_j * x_{t - J + 1 + j}, plus bias, for each channel; with `activate`, silu of that.

    The state is the last J - 1 inputs, in x's dtype. Sums are in float32.
    """
    taps_JC = weight_CJ.float().T
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    starts = rows.starts_B1.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        entry = state_RJ1C[rows.rows_B[b]]
        seen = torch.cat((entry, x_TC[start:end]))
        total = torch.zeros(end - start, x_TC.shape[1], device=x_TC.device)
        for j, tap_C in enumerate(taps_JC):
            total = total + tap_C * seen[j : j + end - start].float()
        total = total if bias_C is None else total + bias_C.float()
        y_TC[start:end] = (silu(total) if activate else total).to(x_TC.dtype)
        if rows.kept_T is not None:
            for t, kept in enumerate(rows.kept_T[start:end].tolist()):
                if kept:
                    state_RJ1C[kept] = seen[t + 1 : t + len(taps_JC)]
        entry.copy_(seen[end - start :])
    return y_TC


@op
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
    """A state S [K, V] for each value head, which decays and to which each token adds k r^T; o = S^T q.

    With `write` (the gated delta rule: Yang et al. 2024, arXiv 2412.06464): r = sigmoid(write) * (v - S^T k), S after
    the decay; queries and keys are scaled to unit length, queries also by K ** -0.5. Without it (Mamba-2: Dao and Gu
    2024, arXiv 2405.21060): r = s * v, s as in `Gates`, where q, k, v are the papers' C, B, x. Value head g takes key
    head g * H // G. State: see `recurrence_shape`, float32. The result is float32.
    """
    delta, each = write_TG is not None, v_TGV.shape[1] // k_THK.shape[1]
    q_THK, k_THK, v_TGV = q_THK.float(), k_THK.float(), v_TGV.float()
    if delta:
        q_THK, k_THK = unit(q_THK) * k_THK.shape[-1] ** -0.5, unit(k_THK)
    step_TG = softplus(raw_TG.float() + gates.bias_G).clamp(gates.low, gates.high)
    decay_TG = torch.exp(-torch.exp(gates.a_log_G) * step_TG)
    beta_TG = step_TG if write_TG is None else 1 / (1 + torch.exp(-write_TG.float()))
    out_TGV = torch.empty_like(v_TGV, memory_format=torch.contiguous_format)
    s_BGKV = state[rows.rows_B].transpose(2, 3).flatten(3)

    def in_tiles(s: Tensor) -> Tensor:
        return s.unflatten(3, (-1, state.shape[-1])).transpose(2, 3)

    for inside, tokens in _by_token(rows):
        k = k_THK[tokens].repeat_interleave(each, 1)[..., None]
        q = q_THK[tokens].repeat_interleave(each, 1)[..., None]
        v, beta = v_TGV[tokens], beta_TG[tokens][..., None]
        s = s_BGKV[inside] * decay_TG[tokens][..., None, None]
        r = beta * (v - (s * k).sum(-2)) if delta else beta * v
        s = s + k * r[..., None, :]
        s_BGKV[inside] = s
        _keep(state, in_tiles(s), tokens, rows)
        out_TGV[tokens] = (s * q).sum(-2)
    _put(state, in_tiles(s_BGKV), rows)
    if gates.skip_G is not None:
        out_TGV = out_TGV + gates.skip_G[:, None] * v_TGV
    return out_TGV


def unit(x: Tensor) -> Tensor:
    """x scaled to unit length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@op
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
    """Mamba-1 (Gu and Dao 2023, arXiv 2312.00752): S [C, N] <- exp(-step * exp(a_log)) S + step x b^T; y = S c +
    skip x.

    step, a_log and skip: float32. y: float32. State: see `scan_shape`.
    """
    x_TC, b_TN, c_TN = x_TC.float(), b_TN.float(), c_TN.float()
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    s_BCN = state[rows.rows_B].transpose(2, 3).flatten(1, 2)

    def in_tiles(s: Tensor) -> Tensor:
        return s.unflatten(1, (-1, state.shape[-1])).transpose(2, 3)

    for inside, tokens in _by_token(rows):
        step, x = step_TC[tokens][..., None], x_TC[tokens][..., None]
        s = (
            torch.exp(-step * torch.exp(a_log_CN)) * s_BCN[inside]
            + step * x * b_TN[tokens][:, None]
        )
        s_BCN[inside] = s
        _keep(state, in_tiles(s), tokens, rows)
        y_TC[tokens] = (s * c_TN[tokens][:, None]).sum(-1)
    _put(state, in_tiles(s_BCN), rows)
    return y_TC + skip_C * x_TC


@op
def gated_rms_norm(
    x_TD: Tensor, gate_TD: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    """RMS norm of groups of `size` features, times weight, and times silu(gate): before the norm with `gate_first`.

    weight: of one group or of all features. x may be float32; the result has the gate's dtype, to which it is rounded
    before the weight.
    """
    x, gate = x_TD.float(), silu(gate_TD.float())
    x = (x * gate if gate_first else x).unflatten(-1, (-1, size))
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    y = x.to(gate_TD.dtype) * weight.view(-1, size)
    y = y.flatten(-2)
    return y if gate_first else (y.float() * gate).to(gate_TD.dtype)


@op
def decaying_sum(x_TC: Tensor, decay_TC: Tensor, state_RC: Tensor, rows: StateRows) -> Tensor:
    """y_t = decay_t * y_(t-1) + x_t for each channel, in float32; the state is the last y."""
    y_TC, s_BC = torch.empty_like(x_TC), state_RC[rows.rows_B]
    for inside, tokens in _by_token(rows):
        s_BC[inside] = y_TC[tokens] = decay_TC[tokens] * s_BC[inside] + x_TC[tokens]
        _keep(state_RC, s_BC[inside], tokens, rows)
    _put(state_RC, s_BC, rows)
    return y_TC


@op
def wkv(
    k_TC: Tensor, v_TC: Tensor, decay_C: Tensor, first_C: Tensor, state_R3C: Tensor, rows: StateRows
) -> Tensor:
    """RWKV-4 (Peng et al. 2023, arXiv 2305.13048): the mean of all values so far, weighed by e^key, older ones less.

    A weight decays by e^(-e^decay) a token; the newest one is multiplied by e^first. float32. The state is the sum of
    the weighed values, the sum of the weights, and the exponent that both have been divided by.
    """
    y_TC, s_B3C = torch.empty_like(k_TC), state_R3C[rows.rows_B]
    for inside, tokens in _by_token(rows):
        total, weights, top = s_B3C[inside].unbind(1)
        top = top.masked_fill(weights == 0, -1e30)  # of a row that starts
        k, v = k_TC[tokens], v_TC[tokens]
        most = torch.maximum(top, k + first_C)
        old, new = torch.exp(top - most), torch.exp(k + first_C - most)
        y_TC[tokens] = (old * total + new * v) / (old * weights + new)
        top = top - torch.exp(decay_C)
        most = torch.maximum(top, k)
        old, new = torch.exp(top - most), torch.exp(k - most)
        s_B3C[inside] = torch.stack((old * total + new * v, old * weights + new, most), 1)
        _keep(state_R3C, s_B3C[inside], tokens, rows)
    _put(state_R3C, s_B3C, rows)
    return y_TC
