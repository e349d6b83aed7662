"""Qwen 3: a norm on each head's query and key, an explicit head size, no biases unless the config sets them."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import GatedMLP, PreNormLayer, SelfAttention
from quire.models.base import CausalLM


class Qwen3(CausalLM):
    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        window = self.cfg.sliding_window if self.cfg.uses_window(i) else None
        attention = SelfAttention(
            self.cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, window=window
        )
        return PreNormLayer(self.cfg, attention, GatedMLP(self.cfg))
