"""Families whose only norms in a layer are after its sublayers: OLMo 2 and 3, EXAONE 4."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import POST_NORM, DecoderLayer, GatedMLP, SelfAttention
from quire.models.base import CausalLM


class Olmo(CausalLM):
    """OLMo 2 and 3: norms over all heads' queries and keys. OLMo 3 has windows in three of four layers."""

    def layer(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        attention = SelfAttention(
            cfg, i, qkv_bias=bias, o_bias=bias, full_qk_norm=True, window=cfg.window(i)
        )
        return DecoderLayer(cfg, attention, GatedMLP(cfg), norms=POST_NORM)


class Exaone4(CausalLM):
    """Norms on heads. The large model has windows in three of four layers, and positions only in these."""

    def layer(self, i: int) -> nn.Module:
        cfg, window = self.cfg, self.cfg.window(i)
        rope = window is not None or not cfg.get("sliding_window")
        attention = SelfAttention(cfg, i, qk_norm=True, window=window, rope=rope)
        return DecoderLayer(cfg, attention, GatedMLP(cfg), norms=POST_NORM)
