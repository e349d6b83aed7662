"""gpt-oss: attention with sinks, windows in every other layer, experts with biases and a clamped SwiGLU.

Source: the model card of gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

from torch import nn

from quire.errors import Unsupported
from quire.layers.decoder_layer import SelfAttention
from quire.layers.moe import MoE
from quire.models.mixtures import Mixture
from quire.ops.experts import Routing
from quire.ops.reference import OAI_ALPHA, OAI_LIMIT


class GptOss(Mixture):
    """gpt-oss 20b and 120b."""

    block = "mlp"

    def attention(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        return SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, sinks=True, window=cfg.window(i))

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok, "logits", rounds=True)

    def mixture(self) -> nn.Module:
        cfg = self.cfg
        for key, known in (("swiglu_limit", OAI_LIMIT), ("swiglu_alpha", OAI_ALPHA)):
            if cfg.get(key, known) != known:
                raise Unsupported(
                    f"{key}={cfg.get(key)} of {self.__class__.__name__}", f"only {known} is known"
                )
        experts = self.experts(act="clamped_swiglu", bias=True, transposed=True, interleaved=True)
        return MoE(self.router(bias=True), experts, checkpoint_names={"gate": "router"})
