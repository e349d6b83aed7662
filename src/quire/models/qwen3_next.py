"""Qwen3-Next and Qwen 3.5: three layers with a gated delta net for each layer with gated attention."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.norm import Norm, RMSNorm
from quire.layers.recurrent import GatedDeltaNet
from quire.models.base import CausalLM
from quire.models.mixtures import Qwen2Moe
from quire.ops.experts import Routing


class Qwen3_5(CausalLM):
    """Qwen 3.5, dense: norms of 1 + weight, except in the delta nets."""

    interleaved = False
    """See `GatedDeltaNet`."""

    def norm(self, size: int) -> Norm:
        return RMSNorm(size, self.cfg.rms_norm_eps, plus_one=True)

    def layer(self, i: int) -> nn.Module:
        return self.decoder_layer(i, GatedMLP(self.cfg))

    def decoder_layer(self, i: int, mlp: nn.Module) -> nn.Module:
        """Layer i with this MLP."""
        cfg, bias = self.cfg, self.cfg.attention_bias
        if cfg.layer_type(i) == "full_attention":
            attention = SelfAttention(
                cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, norm=self.norm, output_gate=True
            )
            return DecoderLayer(cfg, attention, mlp, norm=self.norm)
        net = GatedDeltaNet(cfg, interleaved=self.interleaved)
        layer = DecoderLayer(cfg, net, mlp, norm=self.norm)
        layer.checkpoint_names = {"self_attn": "linear_attn"}
        return layer


class Qwen3Next(Qwen3_5, Qwen2Moe):
    """Qwen3-Next: a mixture with a shared expert, and projections in the order of the key heads."""

    interleaved = True

    def layer(self, i: int) -> nn.Module:
        return Qwen2Moe.layer(self, i)


class Qwen3_5Moe(Qwen3Next):
    """Qwen 3.5 with experts in all layers, whose weights always sum to one."""

    interleaved = False

    def is_mixture(self, i: int) -> bool:
        return True

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok, rounds=True)
