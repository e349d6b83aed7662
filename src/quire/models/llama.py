"""Llama and the families that differ from it in biases, windows and norms on heads.

To add a family whose config.json says all that differs, map its architecture to one of these in `registry.py`.
"""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.models.base import CausalLM


class Llama(CausalLM):
    """Llama 1 to 3, and the many models that use its architecture (Yi, TinyLlama, SmolLM, InternLM 3, ...)."""

    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        attention = SelfAttention(self.cfg, i, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg, bias=self.cfg.mlp_bias))


class Mistral(CausalLM):
    """A sliding window in all layers, if the checkpoint has one (7B v0.1 only)."""

    def layer(self, i: int) -> nn.Module:
        attention = SelfAttention(self.cfg, i, window=self.cfg.get("sliding_window"))
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class Qwen2(CausalLM):
    """Qwen 2 and 2.5: biases on queries, keys and values; some checkpoints have a window in the upper layers."""

    def layer(self, i: int) -> nn.Module:
        window = self.cfg.sliding_window if self.cfg.uses_window(i) else None
        attention = SelfAttention(self.cfg, i, qkv_bias=True, window=window)
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))


class Qwen3(CausalLM):
    """A norm on each head's query and key, an explicit head size, no biases unless config.json sets them."""

    def layer(self, i: int) -> nn.Module:
        bias = self.cfg.attention_bias
        window = self.cfg.sliding_window if self.cfg.uses_window(i) else None
        attention = SelfAttention(
            self.cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, window=window
        )
        return DecoderLayer(self.cfg, attention, GatedMLP(self.cfg))
