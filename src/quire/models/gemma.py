"""Gemma 1, 2 and 3: scaled embeddings, norms that multiply by 1 + weight, and from 2 on a norm after each sublayer.

The text models inside Gemma 3's wrappers have the same names and layers.
"""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import SANDWICH, DecoderLayer, GatedMLP, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.norm import Norm, RMSNorm
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig


class Gemma(CausalLM):
    """Gemma 1. Its config.json says "gelu" and means the approximation."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        attention = SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias)
        act = "gelu_pytorch_tanh" if cfg.hidden_act == "gelu" else None
        return DecoderLayer(cfg, attention, GatedMLP(cfg, act=act), norm=self.norm)

    def norm(self, size: int) -> Norm:
        return RMSNorm(size, self.cfg.rms_norm_eps, plus_one=True)

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return float(cfg.hidden_size**0.5)


class Gemma2(Gemma):
    """Soft caps of scores and logits; windows in every second layer."""

    qk_norm = False

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        attention = SelfAttention(
            cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=self.qk_norm, norm=self.norm, window=cfg.window(i),
            scale=cfg.query_pre_attn_scalar**-0.5, softcap=cfg.get("attn_logit_softcapping"),
        )  # fmt: skip
        return DecoderLayer(cfg, attention, GatedMLP(cfg), norms=SANDWICH, norm=self.norm)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        cap = cfg.get("final_logit_softcapping")
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, softcap=cap)


class Gemma3(Gemma2):
    """Norms on heads; windows in five of six layers, which have a rotary embedding of their own."""

    qk_norm = True
