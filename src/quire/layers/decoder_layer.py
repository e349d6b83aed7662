"""Decoder layers and their parts; model families pass different keywords.

Knows one layer and a list of layers. Does not know the KV cache.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size or features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.attention.base import QKNormRope
from quire.errors import ConfigError
from quire.forward_context import current_batch
from quire.layers.attention import Attention, PackedAttention
from quire.layers.linear import Linear
from quire.layers.native_parts import AttentionParts, LayerParts, replaces
from quire.layers.norm import Norm, NormFactory, RMSNorm
from quire.layers.rotary import Angles
from quire.ops.reference import multiply_sigmoid, rotate
from quire.parallel.ranks import current_ranks, head_slices, output_slices


class QueryScale(NamedTuple):
    """A factor of queries that grows with the position p: 1 + beta * ln(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0

    def __call__(self, positions_T: Tensor) -> Tensor:
        """scale_T, float32."""
        steps_T = (positions_T + self.offset).div(self.length, rounding_mode="floor")
        return 1 + self.beta * steps_T.float().log1p()


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        cfg: the model's `TextConfig`.
        layer: which layer of the model.
        head_dim, kv_heads: of this layer, if `cfg` has others.
        inputs: features of its input, if not the hidden size.
        window, scale, softcap, shared: see `Attention`; with `shared`, a subclass must not project keys and values.
        sinks: whether each head has a sink (see `AttentionSpec`).
        qk_norm: a norm of each head's query and key before the rotation.
        full_qk_norm: one norm of all heads' queries, and one of all keys, instead.
        norm: makes these norms; None: RMS norms.
        query_scale: see `QueryScale`; not with `qk_norm`.
        output_gate: `q_proj` gives each head's query and a gate; the output is multiplied by the gate's sigmoid.
        interleaved: rotates pairs of adjacent features, instead of pairs half a head apart.
        rope: whether this layer applies rotary positions.
        causal: None: as config.json says. False: a token attends to later tokens too, and the layer has no KV cache; `window` then counts to both sides.
            Without softcap, sinks and `shared`.
        names: of queries, keys, values, all three packed, and the output projection in checkpoints.
    """

    checkpoint_names: Mapping[str, str] = {"attn": ""}

    def __init__(
        self,
        cfg: Any,
        layer: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        inputs: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        full_qk_norm: bool = False,
        norm: NormFactory | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        query_scale: QueryScale | None = None,
        output_gate: bool = False,
        shared: Attention | None = None,
        interleaved: bool = False,
        rope: bool = True,
        causal: bool | None = None,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    ):
        super().__init__()
        self.checkpoint_names = {**self.checkpoint_names, "o_proj": names[4]}
        self.size = head_dim or cfg.head_dim
        heads: tuple[int, int] = cfg.num_attention_heads, kv_heads or cfg.num_key_value_heads
        self.shares = shares = head_slices(*heads) if causal is not False else ()  # of heads
        self.ranks = current_ranks() if shares else None
        self.heads, self.kv_heads = (shares[0].length, shares[1].length) if shares else heads
        sizes = self.size * (2 if output_gate else 1), self.size, self.size
        self.sizes = [
            n * size
            for n, size in zip((self.heads, self.kv_heads, self.kv_heads), sizes, strict=True)
        ]
        self.output_gate = output_gate
        parts = dict(zip(names[:3], self.sizes, strict=True))
        own = [share.times(size) for share, size in zip(shares, sizes, strict=False)]
        self.qkv = Linear(
            inputs or cfg.hidden_size, parts, bias=qkv_bias, packed=names[3], shares=own
        )
        self.o_proj = Linear(
            heads[0] * self.size, cfg.hidden_size, bias=o_bias, gathers=bool(shares)
        )
        self.full_qk_norm = full_qk_norm
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if qk_norm or full_qk_norm:
            make = norm or partial(RMSNorm, eps=cfg.rms_norm_eps)
            counts = heads if full_qk_norm else (1, 1)
            self.q_norm, self.k_norm = (make(count * self.size) for count in counts)
        self.query_scale, self.interleaved, self.rope = query_scale, interleaved, rope
        self.attn: Any  # Attention or PackedAttention
        if causal is None:
            causal = cfg.get("is_causal", True)
        if not causal:
            sizes = (self.heads, self.kv_heads, self.size)
            self.attn = PackedAttention(*sizes, scale=scale, window=window)
            return
        self.attn = Attention(
            self.heads, self.kv_heads, self.size, scale=scale, window=window, softcap=softcap, shared=shared,
            layer_index=layer,
            sinks=nn.Parameter(torch.empty(self.heads), requires_grad=False) if sinks else None,
        )  # fmt: skip
        self.attn.own_shares["sinks"] = shares[:1]

    def native(self) -> AttentionParts | None:
        """See `AttentionParts`; a subclass computes something else, unless it says the same."""
        return AttentionParts(self) if type(self) is SelfAttention else None

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        q_THD, k_TKD, v_TKD = self.project(x_TD)
        if not self.output_gate:
            return self.o_proj(self.attend(q_THD, k_TKD, v_TKD, angles))
        q_THD, gate_THD = q_THD.chunk(2, -1)
        o_TD = self.attend(q_THD.contiguous(), k_TKD, v_TKD, angles)
        return self.o_proj(multiply_sigmoid(o_TD, gate_THD))

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, angles: Angles) -> Tensor:
        """Norms of heads, rotation and attention; o_TD."""
        if self.rope and (how := self._norm_and_rope()) is not None:
            o_THD = self.attn.fused_rope(q_THD, k_TKD, v_TKD, how, angles)
            if o_THD is not None:
                return o_THD.flatten(-2)
        if not self.full_qk_norm and self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        if self.rope:
            q_THD = rotate(q_THD, *angles, self.interleaved)
            k_TKD = rotate(k_TKD, *angles, self.interleaved)
        return self.attn(q_THD, k_TKD, v_TKD).flatten(-2)

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_THD (with the gates, if there are), k_TKD and v_TKD, before the norms of heads and the rotation."""
        q, k, v = self.qkv(x_TD).split(self.sizes, -1)
        if self.full_qk_norm:
            q, k = self._flat_norms(q, k)
        q_THD = q.unflatten(-1, (self.heads, -1))
        if self.query_scale is not None:
            scale_T = self.query_scale(current_batch().positions_T)
            q_THD = q_THD * scale_T.to(q.dtype)[:, None, None]
        return (
            q_THD,
            k.unflatten(-1, (self.kv_heads, self.size)),
            v.unflatten(-1, (self.kv_heads, self.size)),
        )

    def _flat_norms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The norms of all heads at once. Ranks gather these before, and each keeps its own."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.ranks is None:
            return self.q_norm(q), self.k_norm(k)
        all_TRW = self.ranks.gather(torch.cat((q, k), -1)).unflatten(-1, (self.ranks.size, -1))
        q_TRW, k_TRW = all_TRW.split((q.shape[-1], k.shape[-1]), -1)
        k_TRW = k_TRW[:, :: self.kv_copies]
        found = []
        for norm, part, share in zip(
            (self.q_norm, self.k_norm), (q_TRW, k_TRW), self.shares, strict=False
        ):
            own = share.times(self.size)
            found.append(norm(part.flatten(1)).narrow(-1, own.start, own.length))
        return found[0], found[1]

    @property
    def kv_copies(self) -> int:
        """The number of neighbouring ranks that have the same keys and values."""
        size = 1 if self.ranks is None else self.ranks.size
        return size * self.shares[1].length // self.shares[1].total if self.shares else 1

    def _norm_and_rope(self) -> QKNormRope | None:
        """For the backend's own pass; None: it does not know these norms."""
        q, k = self.q_norm, self.k_norm
        if self.full_qk_norm or q is None or k is None:
            return QKNormRope(self.interleaved)
        if type(q) is not RMSNorm:
            return None
        return QKNormRope(self.interleaved, q.weight, k.weight, q.eps, q.plus_one)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)).

    Args:
        width: of the gate, if not the config's `intermediate_size`.
        names: of gate, up, both packed, and down in checkpoints.
        down_bias: whether `down` alone has a bias.
    """

    def __init__(
        self,
        cfg: Any,
        *,
        bias: bool = False,
        down_bias: bool = False,
        act: str | None = None,
        width: int | None = None,
        names: Sequence[str] = ("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    ):
        super().__init__()
        gate, up, packed, down = names
        self.checkpoint_names = {"down_proj": down}
        inner = width or cfg.intermediate_size
        shares = output_slices(inner)
        own = shares[0].length if shares else inner
        parts = {gate: own, up: own}
        act = act or cfg.hidden_act
        act = "silu" if act == "swish" else act
        if act not in ("silu", "gelu", "gelu_pytorch_tanh"):
            raise ConfigError(f"hidden_act={act!r} is not supported by the gated MLP")
        self.gate_up = Linear(
            cfg.hidden_size, parts, bias=bias, packed=packed, act=act, shares=[*shares, *shares]
        )
        self.down_proj = Linear(
            inner, cfg.hidden_size, bias=bias or down_bias, gathers=bool(shares)
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.gate_up(x_TD))


PRE_NORM = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class LayerNorms(NamedTuple):
    """The norms of a decoder layer by role; None: it has no such norm."""

    attention_in: Norm | None
    attention_out: Norm | None
    mlp_in: Norm | None
    mlp_out: Norm | None


class DecoderLayer(nn.Module):
    """x + residual_scale * norm(attention(norm(x))), then the same with the MLP; `residual` carries the sum.

    Args:
        norms: the names of the norms in checkpoints, in the order of `LayerNorms`; None: no norm there.
        norm: makes them; None: RMS norms.
    """

    checkpoint_names: Mapping[str, str] = {}
    """See `named_layers` (layers/weight_slots.py)."""

    def __init__(
        self,
        cfg: Any,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        norms: Sequence[str | None] = PRE_NORM,
        norm: NormFactory | None = None,
        residual_scale: float = 1.0,
    ):
        super().__init__()
        make = norm or partial(RMSNorm, eps=cfg.rms_norm_eps)
        self.self_attn = attention
        self.mlp = mlp
        self.norms = LayerNorms(
            *(None if name is None else make(cfg.hidden_size) for name in norms)
        )
        for name, module in zip(norms, self.norms, strict=True):
            if name is not None:
                self.register_module(name, module)
        self.residual_scale = residual_scale

    def native(self) -> LayerParts | None:
        """See `LayerParts`; methods that a subclass replaces are called."""
        other = partial(replaces, self, DecoderLayer)
        if other("forward", "_output"):
            return None
        attention = None if other("attention_sublayer") else self.self_attn
        mlp = None if other("mlp_sublayer") else self.mlp
        finish = self.finish if other("finish") else None
        return LayerParts(self.norms, attention, mlp, self.residual_scale, finish=finish)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        return self.finish(*self.mlp_sublayer(*self.attention_sublayer(x_TD, residual_TD, angles)))

    def attention_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Attention and its norms."""
        x_TD, residual_TD = normed_sum(self.norms.attention_in, x_TD, residual_TD)
        return self._output(self.norms.attention_out, self.self_attn(x_TD, angles)), residual_TD

    def mlp_sublayer(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The MLP and its norms."""
        x_TD, residual_TD = normed_sum(self.norms.mlp_in, x_TD, residual_TD)
        return self._output(self.norms.mlp_out, self.mlp(x_TD)), residual_TD

    def finish(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """What a family adds after both sublayers."""
        return x_TD, residual_TD

    def _output(self, norm: Norm | None, y_TD: Tensor) -> Tensor:
        y_TD = y_TD if norm is None else norm(y_TD)
        return y_TD if self.residual_scale == 1.0 else y_TD * self.residual_scale


class MixerLayer(nn.Module):
    """x + mixer(norm(x)), where the mixer is attention, a recurrent layer, or an MLP; see `DecoderLayer`."""

    def __init__(self, mixer: nn.Module, norm: Norm):
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = normed_sum(self.norm, x_TD, residual_TD)
        attends = isinstance(self.mixer, SelfAttention)
        return self.mixer(x_TD, angles) if attends else self.mixer(x_TD), residual_TD


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)); see `DecoderLayer`."""

    def __init__(self, cfg: Any, attention: nn.Module, mlp: nn.Module, norm: NormFactory):
        super().__init__()
        self.input_layernorm = norm(cfg.hidden_size)
        self.self_attn = attention
        self.mlp = mlp

    def native(self) -> LayerParts | None:
        """See `LayerParts`."""
        if type(self) is not ParallelLayer:
            return None
        norms = LayerNorms(self.input_layernorm, None, None, None)
        return LayerParts(norms, self.self_attn, self.mlp, parallel=True)

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        return self.mlp_sublayer(*self.attention_sublayer(x_TD, residual_TD, angles))

    def attention_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """The MLP's input, and the sum with attention."""
        x_TD, residual_TD = normed_sum(self.input_layernorm, x_TD, residual_TD)
        return x_TD, residual_TD + self.self_attn(x_TD, angles)

    def mlp_sublayer(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The MLP alone."""
        return self.mlp(x_TD), residual_TD


def normed_sum(
    norm: Norm | None, x_TD: Tensor, residual_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual (the sum itself, without a norm), and the sum."""
    if norm is None:
        total_TD = x_TD if residual_TD is None else residual_TD + x_TD
        return total_TD, total_TD
    return (norm(x_TD), x_TD) if residual_TD is None else norm.add(x_TD, residual_TD)
