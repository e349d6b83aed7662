"""Llama 1 to 3, and the many models that use its architecture (Yi, TinyLlama, SmolLM, InternLM 3, ...)."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import GatedMLP, PreNormLayer, SelfAttention
from quire.models.base import CausalLM


class Llama(CausalLM):
    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        attention = SelfAttention(self.cfg, i, qkv_bias=bias, o_bias=bias)
        return PreNormLayer(self.cfg, attention, GatedMLP(self.cfg, bias=self.cfg.mlp_bias))
