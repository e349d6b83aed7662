"""Llama 4, text: attention in chunks on layers with rotary positions, the others without positions; top-1 experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.layers.chunked_attention import ChunkedAttention
from quire.layers.decoder_layer import DecoderLayer, GatedMLP, QueryScale, SelfAttention
from quire.layers.moe import MoE
from quire.layers.rotary import Angles
from quire.models.hf_config import TextConfig
from quire.models.mixtures import Mixture
from quire.ops.experts import Routing
from quire.ops.reference import rms_norm, rotate


class Llama4Attention(SelfAttention):
    """Queries and keys are rotated, then scaled to unit mean square if `qk_norm`; a token sees its chunk only."""

    def __init__(self, cfg: Any, layer: int, qk_norm: bool, **options: Any):
        super().__init__(cfg, layer, interleaved=True, **options)
        self.eps = cfg.rms_norm_eps if qk_norm else None
        sizes = (self.heads, self.kv_heads, self.size)
        self.attn = ChunkedAttention(*sizes, window=cfg.attention_chunk_size, layer_index=layer)

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        q_THD, k_TKD, v_TKD = self.project(x_TD)
        q_THD, k_TKD = (rotate(each, *angles, True) for each in (q_THD, k_TKD))
        if self.eps is not None:
            q_THD, k_TKD = (rms_norm(each, None, self.eps) for each in (q_THD, k_TKD))
        return self.o_proj(self.attn(q_THD, k_TKD, v_TKD).flatten(-2))


class Llama4(Mixture):
    """Llama 4 Scout and Maverick."""

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        super().__init__(cfg, max_length)
        if (max_length or cfg.max_position_embeddings) > cfg.attention_chunk_size:
            self.capturable = False  # a step's rows in chunks are known to the host alone

    def attention(self, i: int) -> nn.Module:
        cfg = self.cfg
        bias = dict.fromkeys(("qkv_bias", "o_bias"), cfg.attention_bias)
        rope = cfg.get("no_rope_layers")
        if rope[i] if rope else (i + 1) % cfg.no_rope_layer_interval:
            return Llama4Attention(cfg, i, cfg.use_qk_norm, **bias)
        tuned = cfg.attn_temperature_tuning
        scale = QueryScale(cfg.attn_scale, cfg.floor_scale, 1) if tuned else None
        return SelfAttention(cfg, i, rope=False, query_scale=scale, **bias)

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        layers, step = cfg.get("moe_layers"), cfg.interleave_moe_layer_step
        has_experts = (i + 1) % step == 0 if layers is None else i in layers
        mlp = self.mixture() if has_experts else GatedMLP(cfg, width=cfg.intermediate_size_mlp)
        layer = DecoderLayer(cfg, self.attention(i), mlp)
        layer.checkpoint_names = {"mlp": "feed_forward"}
        return layer

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok, "logits", renormalize=False, rounds=True)

    def mixture(self) -> nn.Module:
        experts = self.experts(transposed=True, on_input=True)
        names = {"gate": "router", "shared": "shared_expert"}
        return MoE(self.router(), experts, GatedMLP(self.cfg), checkpoint_names=names)
