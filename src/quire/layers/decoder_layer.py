"""Decoder layers and their parts; model families pass different keywords.

Knows one layer and a list of layers. Does not know the KV cache.

Shape suffixes: T tokens, H query heads, K key/value heads, D head size or features.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from quire.attention.base import QKNormRope
from quire.errors import ConfigError
from quire.forward_context import current_batch
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles, LayerRotaries
from quire.ops.reference import rotate


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        cfg: the model's `TextConfig`.
        layer: which layer of the model.
        window, scale, softcap: see `Attention`.
        qk_norm: RMS norm of each head's query and key before the rotation.
        interleaved: rotates pairs of adjacent features, instead of pairs half a head apart.
        rope: whether this layer applies rotary positions.
    """

    def __init__(
        self,
        cfg: Any,
        layer: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        interleaved: bool = False,
        rope: bool = True,
    ):
        super().__init__()
        heads, kv_heads, size = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.sizes = (heads * size, kv_heads * size, kv_heads * size)
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv = Linear(cfg.hidden_size, parts, bias=qkv_bias, packed="qkv_proj")
        self.o_proj = Linear(heads * size, cfg.hidden_size, bias=o_bias)
        self.q_norm = RMSNorm(size, cfg.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(size, cfg.rms_norm_eps) if qk_norm else None
        self.interleaved, self.rope = interleaved, rope
        self.attn = Attention(
            heads, kv_heads, size, scale=scale, window=window, softcap=softcap, layer_index=layer
        )

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        q, k, v = self.qkv(x_TD).split(self.sizes, -1)
        q_THD = q.unflatten(-1, (self.heads, self.size))
        k_TKD = k.unflatten(-1, (self.kv_heads, self.size))
        v_TKD = v.unflatten(-1, (self.kv_heads, self.size))
        if self.rope:
            o_THD = self.attn.fused_rope(q_THD, k_TKD, v_TKD, self._norm_and_rope(), angles)
            if o_THD is not None:
                return self.o_proj(o_THD.flatten(-2))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        if self.rope:
            q_THD = rotate(q_THD, *angles, self.interleaved)
            k_TKD = rotate(k_TKD, *angles, self.interleaved)
        return self.o_proj(self.attn(q_THD, k_TKD, v_TKD).flatten(-2))

    def _norm_and_rope(self) -> QKNormRope:
        if self.q_norm is None or self.k_norm is None:
            return QKNormRope(self.interleaved)
        q, k = self.q_norm, self.k_norm
        return QKNormRope(self.interleaved, q.weight, k.weight, q.eps, q.plus_one)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, cfg: Any, *, bias: bool = False, act: str | None = None):
        super().__init__()
        inner = cfg.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        act = act or cfg.hidden_act
        act = "silu" if act == "swish" else act
        if act not in ("silu", "gelu", "gelu_pytorch_tanh"):
            raise ConfigError(f"hidden_act={act!r} is not supported by the gated MLP")
        self.gate_up = Linear(cfg.hidden_size, parts, bias=bias, packed="gate_up_proj", act=act)
        self.down_proj = Linear(inner, cfg.hidden_size, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.gate_up(x_TD))


class PreNormLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `residual` carries the sum."""

    def __init__(self, cfg: Any, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        return self.mlp_half(*self.attention_half(x_TD, residual_TD, angles))

    def attention_half(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """The input norm and attention."""
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add(x_TD, residual_TD)
        return self.self_attn(x_TD, angles), residual_TD

    def mlp_half(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The second norm and the MLP."""
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class FusedLayers(Protocol):
    """All layers and the last norm in few kernel calls, with the same results."""

    def run(self, x_TD: Tensor, positions: Tensor, rotary: LayerRotaries) -> Tensor:
        """As `Layers.forward`; may overwrite x."""
        ...


class Layers(nn.ModuleList):
    """The decoder layers of a model, in order.

    A layer takes (x_TD, residual_TD or None, angles) and returns (x_TD, residual_TD); its output is their sum.
    """

    fused: FusedLayers | None = None  # set if kernel calls compute several modules at once
    recorded: frozenset[int] = frozenset()  # see `LanguageModel.record_hidden_states`

    def forward(
        self, x_TD: Tensor, positions: Tensor, rotary: LayerRotaries, norm: RMSNorm
    ) -> Tensor:
        """The normed output of the last layer; positions: see `Rotary.forward`."""
        if self.fused is not None:
            return self.fused.run(x_TD, positions, rotary)
        residual_TD: Tensor | None = None
        for number, (layer, angles) in enumerate(zip(self, rotary(positions), strict=True)):
            self.record(number, x_TD, residual_TD)
            x_TD, residual_TD = layer(x_TD, residual_TD, angles)
        self.record(len(self), x_TD, residual_TD)
        return norm(x_TD) if residual_TD is None else norm.add(x_TD, residual_TD)[0]

    def record(self, number: int, x_TD: Tensor, residual_TD: Tensor | None) -> None:
        """Copy the output of `number` layers to the batch, if it is wanted."""
        if number in self.recorded:
            copied = x_TD.clone() if residual_TD is None else x_TD + residual_TD
            current_batch().hidden_states[number] = copied
