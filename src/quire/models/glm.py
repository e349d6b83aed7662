"""GLM-4: adjacent features are rotated in pairs, half of the features in all."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quire.layers.decoder_layer import PRE_NORM, DecoderLayer, GatedMLP, SelfAttention
from quire.models.base import CausalLM


class Glm(CausalLM):
    """GLM-4 9B of 2024, and GLM-Edge."""

    norms: Sequence[str | None] = PRE_NORM

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        attention = SelfAttention(cfg, i, qkv_bias=cfg.attention_bias, interleaved=True)
        return DecoderLayer(cfg, attention, GatedMLP(cfg), norms=self.norms)


class Glm4(Glm):
    """GLM-4-0414: norms after the sublayers as well."""

    norms = (
        *("input_layernorm", "post_self_attn_layernorm"),
        *("post_attention_layernorm", "post_mlp_layernorm"),
    )
