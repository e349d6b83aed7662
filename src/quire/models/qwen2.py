"""Qwen 2 and 2.5: biases on queries, keys and values; some checkpoints have a window in the upper layers."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import GatedMLP, PreNormLayer, SelfAttention
from quire.models.base import CausalLM


class Qwen2(CausalLM):
    def layer(self, i: int) -> nn.Module:
        window = self.cfg.sliding_window if self.cfg.uses_window(i) else None
        attention = SelfAttention(self.cfg, i, qkv_bias=True, window=window)
        return PreNormLayer(self.cfg, attention, GatedMLP(self.cfg))
