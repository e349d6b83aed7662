"""LFM2 and LFM2-MoE: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.moe import W123, Experts, MoE, Router
from quire.layers.recurrent import ShortConv
from quire.models.base import CausalLM
from quire.models.mamba_hybrids import named
from quire.ops.experts import Routing

NAMES = ("w1", "w3", "gate_up_proj", "w2")


class Lfm2(CausalLM):
    """LFM2, dense."""

    decoder_names: ClassVar = {"norm": "embedding_norm"}

    def layer(self, i: int) -> nn.Module:
        cfg, norms = self.cfg, ("operator_norm", None, "ffn_norm", None)
        if self.attends(i):
            attention = SelfAttention(cfg, i, qk_norm=True)
            named(attention, o_proj="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
            return named(DecoderLayer(cfg, attention, self.mlp(i), norms=norms), mlp="feed_forward")
        conv = ShortConv(cfg.hidden_size, cfg.conv_L_cache, bias=cfg.get("conv_bias", False))
        layer = DecoderLayer(cfg, conv, self.mlp(i), norms=norms)
        return named(layer, self_attn="conv", mlp="feed_forward")

    def attends(self, i: int) -> bool:
        """Whether layer i is attention."""
        if self.cfg.get("layer_types"):
            return self.cfg.layer_type(i) == "full_attention"
        return i in self.cfg.get("full_attn_idxs", range(self.cfg.num_hidden_layers))

    def mlp(self, i: int) -> nn.Module:
        return GatedMLP(self.cfg, width=self.width(), names=NAMES)

    def width(self) -> int:
        """The size that config.json says, or what Llama's rule makes of it."""
        cfg, inner = self.cfg, self.cfg.intermediate_size
        if not cfg.get("block_auto_adjust_ff_dim", True):
            return int(inner)
        inner = int(cfg.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        multiple = cfg.get("block_multiple_of", 256)
        return int(-(-inner // multiple) * multiple)


class Lfm2Moe(Lfm2):
    """LFM2-MoE: experts after the first `num_dense_layers` layers."""

    def mlp(self, i: int) -> nn.Module:
        cfg, hidden = self.cfg, self.cfg.hidden_size
        if i < cfg.num_dense_layers:
            return GatedMLP(cfg, names=NAMES)
        routing = Routing(
            *(cfg.num_experts_per_tok, "sigmoid", cfg.norm_topk_prob, 1e-6, cfg.routed_scaling_factor),
            rounds=True,
        )  # fmt: skip
        correction = "expert_bias" if cfg.use_expert_bias else None
        router = Router(hidden, cfg.num_experts, routing, correction=correction)
        experts = Experts(hidden, cfg.moe_intermediate_size, cfg.num_experts, names=W123)
        return MoE(router, experts)
