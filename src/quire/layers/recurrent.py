"""Recurrent layers: gated delta net, Mamba-2, Mamba-1 and gated short convolution.

Knows projections, convolutions and gates, and the names of their tensors. Does not know how a recurrence is computed
(`ops/recurrent.py`), or where states are allocated (`layers/state.py`).

Decays, skips and convolutions are never quantized; decays and skips are float32.

Shape suffixes: T tokens, D features, C channels, J taps of a convolution, H key heads, K size of a key, G value heads, V
size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.forward_context import KEPT_STATES, current_batch
from quire.kvcache.specs import StateSpec
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.state import StateLayer
from quire.layers.weight_slots import Layer, set_parameter
from quire.ops.recurrent import (
    TILE,
    Gates,
    StateRows,
    causal_conv,
    gated_rms_norm,
    linear_recurrence,
    recurrence_shape,
    scan_shape,
    selective_scan,
    silu,
    softplus,
)
from quire.ops.reference import rms_norm
from quire.parallel.ranks import OutputSlice, current_ranks, head_slices, output_slices


def step_rows() -> StateRows:
    """The rows of this step."""
    batch = current_batch()
    return StateRows(batch.rows_B, batch.query_start_B1, batch.extras.get(KEPT_STATES))


class CausalConv(Layer):
    """Depthwise convolution over the tokens of a row: y_t of x_(t-J+1) .. x_t; with `activate`, silu of it."""

    weight: Tensor

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        bias: bool = False,
        activate: bool = True,
        shares: Sequence[OutputSlice] = (),
    ):
        super().__init__()
        self.channels, self.taps, self.activate = channels, taps, activate
        self.new("weight", channels, taps)
        if bias:
            self.new("bias", channels)
        self.dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        self.own_shares |= {"weight": shares, "bias": shares}

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    def forward(self, x_TC: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        bias_C = self._parameters.get("bias")
        return causal_conv(x_TC, self.weight, bias_C, state, rows, self.activate)


class GatedNorm(Layer):
    """RMS norm of groups of `group` features, with a gate; see `ops.recurrent.gated_rms_norm`."""

    weight: Tensor
    random_mean = 1.0

    def __init__(
        self,
        features: int,
        eps: float,
        *,
        group: int | None = None,
        gate_first: bool = False,
        shares: Sequence[OutputSlice] = (),
    ):
        super().__init__()
        self.eps, self.group, self.gate_first = eps, group or features, gate_first
        self.new("weight", features)
        self.own_shares["weight"] = shares

    def forward(self, x_TD: Tensor, gate_TD: Tensor) -> Tensor:
        return gated_rms_norm(x_TD, gate_TD, self.weight, self.eps, self.group, self.gate_first)


class RecurrentLayer(StateLayer):
    """A layer with the state of a recurrence, in float32, and the state of its convolution `conv1d`."""

    conv1d: CausalConv
    recurrence_shape: tuple[int, ...]
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def state_spec(self) -> StateSpec:
        return StateSpec(
            (self.recurrence_shape, self.conv1d.state_shape), ("float32", self.conv1d.dtype)
        )

    def new_float(self, name: str, *shape: int, shares: Sequence[OutputSlice] = ()) -> None:
        """Register an empty parameter of float32."""
        set_parameter(self, name, torch.empty(*shape, dtype=torch.float32))
        self.own_shares[name] = shares


def own_heads(
    value_heads: int, key_heads: int, *sizes: int
) -> tuple[OutputSlice, OutputSlice, bool]:
    """This rank's value heads and key heads, and whether other ranks have others; all, if they cannot be divided.

    Where there are fewer key heads than ranks, neighbours have the same one. `sizes`: of a value and of a key. Heads of a size that
    is no multiple of 16 are not divided: torch computes the ends of rows with other bits.
    """
    found = () if any(size % TILE for size in sizes) else head_slices(value_heads, key_heads)
    if found:
        return found[0], found[1], True
    return OutputSlice(0, value_heads, value_heads), OutputSlice(0, key_heads, key_heads), False


class GatedDeltaNet(RecurrentLayer):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) of Qwen3-Next and Qwen 3.5.

    Ranks split the heads. The gates of all heads are computed on each rank: they are few outputs.

    `interleaved`: the checkpoint stores its projections as `in_proj_qkvz` and `in_proj_ba`, whose rows are in the order
    of the key heads: each with its query, key, values and gates, as Qwen3-Next has them.
    """

    def __init__(self, cfg: Any, *, interleaved: bool = False):
        super().__init__()
        self.K, self.V = cfg.linear_key_head_dim, cfg.linear_value_head_dim
        heads = cfg.linear_num_value_heads, cfg.linear_num_key_heads
        ranks = current_ranks()
        # A rank has all value heads of its key heads where the checkpoint stores them together.
        divides = ranks is None or not interleaved or heads[1] % ranks.size == 0
        sizes = (self.V, self.K) if divides else (1,)
        self.own, keys_own, split = own_heads(*heads, *sizes)
        self.own_keys, self.all_key_heads = keys_own, heads[1]
        self.heads, self.key_heads = self.own.length, keys_own.length
        keys, values = self.key_heads * self.K, self.heads * self.V
        self.sizes, hidden = [keys, keys, values], cfg.hidden_size
        key, value = keys_own.times(self.K), self.own.times(self.V)
        shares = (key, key, value) if split else ()
        self.interleaved = interleaved
        if interleaved:
            each = keys_own.times(2 * (keys + values) // self.key_heads)
            self.in_proj_qkvz = Linear(
                hidden, 2 * keys + 2 * values, shares=(each,) if split else ()
            )
            self.in_proj_ba = Linear(hidden, 2 * self.own.total)
        else:
            parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
            z = (value,) if split else ()
            self.in_proj = Linear(hidden, parts, packed="in_proj_qkvz", shares=(*shares, *z))
            gates = {"in_proj_b": self.own.total, "in_proj_a": self.own.total}
            self.in_gates = Linear(hidden, gates, packed="in_proj_ba")
        self.conv1d = CausalConv(2 * keys + values, cfg.linear_conv_kernel_dim, shares=shares)
        self.recurrence_shape = recurrence_shape(self.heads, self.K, self.V)
        self.new_float("dt_bias", self.heads, shares=(self.own,))
        self.new_float("A_log", self.heads, shares=(self.own,))
        self.norm = GatedNorm(self.V, cfg.rms_norm_eps)
        self.out_proj = Linear(self.own.total * self.V, hidden, gathers=split)

    def forward(self, x_TD: Tensor, angles: object = None) -> Tensor:
        rows, (state, conv_state) = step_rows(), self.state
        qkv_TC, z_TD, b_TG, a_TG = self._project(x_TD)
        q, k, v = self.conv1d(qkv_TC, conv_state, rows).split(self.sizes, -1)
        q_THK = q.unflatten(-1, (self.key_heads, self.K))
        k_THK = k.unflatten(-1, (self.key_heads, self.K))
        v_TGV = v.unflatten(-1, (self.heads, self.V))
        gates = Gates(self.dt_bias, self.A_log)
        o_TGV = linear_recurrence(q_THK, k_THK, v_TGV, a_TG, b_TG, gates, state, rows)
        return self.out_proj(self.norm(o_TGV.flatten(1), z_TD))

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side; output gates; write gates; inputs of the decays."""
        if not self.interleaved:
            qkv_TC, z_TD = self.in_proj(x_TD).split((sum(self.sizes), self.sizes[2]), -1)
            b_TG, a_TG = self.in_gates(x_TD).chunk(2, -1)
            return qkv_TC, z_TD, self.own.of(b_TG), self.own.of(a_TG)
        each = self.heads // self.key_heads
        by_head = self.in_proj_qkvz(x_TD).unflatten(-1, (self.key_heads, -1))
        *qkv, z = by_head.split((self.K, self.K, each * self.V, each * self.V), -1)
        b, a = self.in_proj_ba(x_TD).unflatten(-1, (self.all_key_heads, -1)).chunk(2, -1)
        b_TG, a_TG = self.own.of(b.flatten(1)), self.own.of(a.flatten(1))
        return torch.cat([x.flatten(1) for x in qkv], -1), z.flatten(1), b_TG, a_TG


class Mamba2Sizes(NamedTuple):
    """The sizes of a Mamba-2 layer: value heads, their size, groups of heads with one B and C, states, taps."""

    heads: int
    head_size: int
    groups: int
    states: int
    taps: int


class Mamba2Mixer(RecurrentLayer):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).

    Ranks split the heads; the step sizes of all heads are computed on each rank. Where ranks share a group of the norm, each norms all
    features.

    Args:
        bias, conv_bias, out_bias: of the projections (out: of the last one, if it differs), and of the convolution.
        limits: of the step size after softplus, as config.json has them: None, or the second maybe a name of infinity.
        norm: whether there is a gated norm; without it the output is multiplied by silu(gate).
        gate_first: the gate multiplies before the norm.
        scales: factors of the products z, x, B, C, dt.
    """

    def __init__(
        self,
        hidden: int,
        sizes: Mamba2Sizes,
        eps: float,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        out_bias: bool | None = None,
        limits: Sequence[Any] | None = None,
        norm: bool = True,
        gate_first: bool = True,
        scales: Sequence[float] | None = None,
    ):
        super().__init__()
        low, high = limits or (0.0, None)
        self.limits = low, high if isinstance(high, int | float) else float("inf")
        self.own, groups, split = own_heads(
            sizes.heads, sizes.groups, sizes.head_size, sizes.states
        )
        self.sizes = sizes._replace(heads=self.own.length, groups=groups.length)
        value, key = self.own.times(sizes.head_size), groups.times(sizes.states)
        steps = OutputSlice(0, sizes.heads, sizes.heads)
        self.parts = (value.length, value.length, key.length, key.length, sizes.heads)
        self.channels = value.length + 2 * key.length
        shares = (value, value, key, key, steps) if split else ()
        self.in_proj = Linear(hidden, sum(self.parts), bias=bias, shares=shares)
        self.conv1d = CausalConv(self.channels, sizes.taps, bias=conv_bias, shares=shares[1:4])
        self.recurrence_shape = recurrence_shape(self.own.length, sizes.states, sizes.head_size)
        for name in ("dt_bias", "A_log", "D"):
            self.new_float(name, self.own.length, shares=(self.own,))
        group = value.total // sizes.groups
        spans = bool(norm and value.length % group)
        self.norm_ranks = current_ranks() if spans else None
        features, cut = (value.total, ()) if spans else (value.length, (value,))
        self.norm: GatedNorm | None = None
        if norm:
            self.norm = GatedNorm(features, eps, group=group, gate_first=gate_first, shares=cut)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = Linear(value.total, hidden, bias=out_bias, gathers=split)
        if spans:
            self.out_proj.ref.input_ranks = None  # the norm has gathered them
        self.scales = scales

    def forward(self, x_TD: Tensor, angles: object = None) -> Tensor:
        rows, (state, conv_state), sizes = step_rows(), self.state, self.sizes
        y = self.in_proj(x_TD)
        if self.scales is not None:
            y = y * self._scale(y)
        z_TD, xbc_TC, dt_TG = y.split((self.parts[0], self.channels, self.parts[4]), -1)
        xbc_TC = self.conv1d(xbc_TC, conv_state, rows)
        x, b, c = xbc_TC.split(self.parts[1:4], -1)
        x_TGV = x.unflatten(-1, (sizes.heads, sizes.head_size))
        b_THK, c_THK = (part.unflatten(-1, (sizes.groups, sizes.states)) for part in (b, c))
        gates, raw_TG = Gates(self.dt_bias, self.A_log, self.D, *self.limits), self.own.of(dt_TG)
        y_TGV = linear_recurrence(c_THK, b_THK, x_TGV, raw_TG, None, gates, state, rows)
        y_TD = y_TGV.flatten(1)
        if self.norm is None:
            return self.out_proj((y_TD * silu(z_TD.float())).to(x_TD.dtype))
        if self.norm_ranks is None:
            return self.out_proj(self.norm(y_TD, z_TD))
        gather = self.norm_ranks.gather
        return self.out_proj(self.norm(gather(y_TD), gather(z_TD)))

    def _scale(self, like: Tensor) -> Tensor:
        parts = zip(self.parts, self.scales or (), strict=True)
        return torch.cat([like.new_full((n,), s) for n, s in parts])


class MambaMixer(RecurrentLayer):
    """Mamba-1 (Gu and Dao 2023, arXiv 2312.00752). Ranks split the channels.

    Args:
        norm_eps: of RMS norms of the step, B and C; None: no norms.
        norm_names: the checkpoint names of these norms; None: they have no weights.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        states: int,
        rank: int,
        taps: int,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float | None = None,
        norm_names: Sequence[str] | None = None,
    ):
        super().__init__()
        self.parts, self.norm_eps, shares = (rank, states, states), norm_eps, output_slices(inner)
        own, split = shares[0].length if shares else inner, bool(shares)
        self.inner = own
        self.in_proj = Linear(hidden, 2 * own, bias=bias, shares=(*shares, *shares))
        self.conv1d = CausalConv(own, taps, bias=conv_bias, shares=shares)
        self.x_proj = Linear(inner, sum(self.parts), gathers=split)
        self.dt_proj = Linear(rank, own, bias=True, shares=shares)
        self.recurrence_shape = scan_shape(own, states)
        self.new_float("A_log", own, states, shares=shares)
        self.new_float("D", own, shares=shares)
        self.norms: list[RMSNorm] = []
        if norm_eps is not None and norm_names is not None:
            self.norms = [RMSNorm(size, norm_eps) for size in self.parts]
            for name, norm in zip(norm_names, self.norms, strict=True):
                self.register_module(name, norm)
        self.out_proj = Linear(inner, hidden, bias=bias, gathers=split)

    def forward(self, x_TD: Tensor, angles: object = None) -> Tensor:
        rows, (state, conv_state) = step_rows(), self.state
        x_TC, z_TC = self.in_proj(x_TD).split(self.inner, -1)
        x_TC = self.conv1d(x_TC, conv_state, rows)
        dt, b_TN, c_TN = self._normed(self.x_proj(x_TC).split(self.parts, -1))
        step_TC = softplus(self.dt_proj(dt.contiguous()).float())
        y_TC = selective_scan(x_TC, step_TC, self.A_log, b_TN, c_TN, self.D, state, rows)
        return self.out_proj((y_TC * silu(z_TC.float())).to(x_TD.dtype))

    def _normed(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.norms:
            return [norm(x) for norm, x in zip(self.norms, parts, strict=True)]
        if self.norm_eps is None:
            return parts
        return [rms_norm(x, None, self.norm_eps) for x in parts]


class ShortConv(StateLayer):
    """Gated short convolution of LFM2: out(C * conv(B * x)), where B, C, x are products of the input. Ranks split the channels."""

    def __init__(self, hidden: int, taps: int, *, bias: bool = False):
        super().__init__()
        shares = output_slices(hidden)
        own, split = shares[0].length if shares else hidden, bool(shares)
        self.in_proj = Linear(hidden, 3 * own, bias=bias, shares=(*shares, *shares, *shares))
        self.conv = CausalConv(own, taps, bias=bias, activate=False, shares=shares)
        self.out_proj = Linear(hidden, hidden, bias=bias, gathers=split)

    def state_spec(self) -> StateSpec:
        return StateSpec((self.conv.state_shape,), (self.conv.dtype,))

    def forward(self, x_TD: Tensor, angles: object = None) -> Tensor:
        b_TD, c_TD, x_TD = self.in_proj(x_TD).chunk(3, -1)
        return self.out_proj(c_TD * self.conv(b_TD * x_TD, self.state[0], step_rows()))
