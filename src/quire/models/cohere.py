"""Command R: attention and MLP read one norm, a layer norm; adjacent features are rotated in pairs; scaled logits."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import GatedMLP, ParallelLayer, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.norm import LayerNorm, Norm
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig


class Cohere(CausalLM):
    """Command R and R+ (whose heads have norms with weights of their own), and Command R7B and A, whose layers have
    either a window and positions, or neither."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias, window = self.cfg, self.cfg.attention_bias, self.cfg.window(i)
        rope = window is not None or not cfg.get("layer_types")
        own_norms = bool(cfg.get("use_qk_norm"))
        attention = SelfAttention(
            cfg, i, qkv_bias=bias, o_bias=bias, window=window, rope=rope, interleaved=True
        )
        if own_norms:
            attention.q_norm = LayerNorm(attention.heads, attention.size, eps=cfg.layer_norm_eps)
            attention.k_norm = LayerNorm(attention.kv_heads, attention.size, eps=cfg.layer_norm_eps)
            attention.q_norm.own_shares["weight"] = attention.shares[:1]
            attention.k_norm.own_shares["weight"] = attention.shares[1:2]
        return ParallelLayer(cfg, attention, GatedMLP(cfg), self.norm)

    def norm(self, size: int) -> Norm:
        return LayerNorm(size, eps=self.cfg.layer_norm_eps)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, scale=cfg.logit_scale)
