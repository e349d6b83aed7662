"""Mistral: Llama with a sliding window in all layers, if the checkpoint has one (7B v0.1 only)."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import GatedMLP, PreNormLayer, SelfAttention
from quire.models.base import CausalLM


class Mistral(CausalLM):
    def layer(self, i: int) -> nn.Module:
        attention = SelfAttention(self.cfg, i, window=self.cfg.get("sliding_window"))
        return PreNormLayer(self.cfg, attention, GatedMLP(self.cfg))
