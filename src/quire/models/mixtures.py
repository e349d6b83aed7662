"""Mixtures of experts over the attention of Llama and its neighbours.

A family says which router and experts it has, what its attention is, and which of its layers are dense.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.moe import W123, Experts, MoE, Router
from quire.layers.norm import LayerNorm, Norm
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.models.llama import Granite
from quire.ops.experts import Routing


class Mixture(CausalLM):
    """A decoder whose layers have a mixture for an MLP. The defaults are Mixtral's."""

    block = "block_sparse_moe"
    """Name of a mixture in checkpoints."""
    inner = "intermediate_size"
    """Name of an expert's inner size in config.json."""

    def layer(self, i: int) -> nn.Module:
        mlp = self.mixture() if self.is_mixture(i) else GatedMLP(self.cfg)
        return self.decoder_layer(i, mlp)

    def decoder_layer(self, i: int, mlp: nn.Module) -> nn.Module:
        """Layer i with this MLP."""
        layer = DecoderLayer(self.cfg, self.attention(i), mlp, norm=self.norm)
        layer.checkpoint_names = {"mlp": self.block}
        return layer

    def is_mixture(self, i: int) -> bool:
        """Whether layer i has a mixture."""
        return True

    def attention(self, i: int) -> nn.Module:
        """The attention of layer i."""
        return SelfAttention(self.cfg, i, window=self.cfg.get("sliding_window"))

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok)

    def router(self, **options: Any) -> Router:
        return Router(self.cfg.hidden_size, self.cfg.num_experts, self.routing(), **options)

    def experts(self, **options: Any) -> Experts:
        inner = getattr(self.cfg, self.inner)
        act = {"swish": "silu"}.get(self.cfg.hidden_act, self.cfg.hidden_act)
        return Experts(self.cfg.hidden_size, inner, self.cfg.num_experts, **{"act": act, **options})

    def mixture(self) -> nn.Module:
        """The MLP of one layer."""
        return MoE(self.router(), self.experts(names=W123))


class Mixtral(Mixture):
    """Mixtral 8x7B and 8x22B."""


class Qwen2Moe(Mixture):
    """Qwen 1.5 and 2 MoE: biases on queries, keys and values, and a shared expert with a gate."""

    block, inner = "mlp", "moe_intermediate_size"

    def is_mixture(self, i: int) -> bool:
        cfg = self.cfg
        return i not in cfg.get("mlp_only_layers", ()) and (i + 1) % cfg.decoder_sparse_step == 0

    def attention(self, i: int) -> nn.Module:
        window = self.cfg.window(i)
        return SelfAttention(self.cfg, i, qkv_bias=self.cfg.qkv_bias, window=window)

    def routing(self) -> Routing:
        cfg = self.cfg
        return Routing(cfg.num_experts_per_tok, renormalize=cfg.norm_topk_prob, rounds=True)

    def mixture(self) -> nn.Module:
        shared = GatedMLP(self.cfg, width=self.cfg.shared_expert_intermediate_size)
        return MoE(self.router(), self.experts(), shared, shared_gate=self.cfg.hidden_size)


class Qwen3Moe(Qwen2Moe):
    """Qwen 3 MoE: a norm on each head's query and key, no shared expert."""

    def attention(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        window = cfg.get("sliding_window") if cfg.use_sliding_window else None
        return SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, window=window)

    def mixture(self) -> nn.Module:
        return MoE(self.router(), self.experts())


class ClippedAttention(SelfAttention):
    """Queries, keys and values are clamped to +-clip before the rotation."""

    def __init__(self, cfg: Any, layer: int, clip: float, **options: Any):
        super().__init__(cfg, layer, **options)
        self.clip = clip

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_TKD, v_TKD = (each.clamp(-self.clip, self.clip) for each in super().project(x_TD))
        return q_THD, k_TKD, v_TKD


class Olmoe(Qwen3Moe):
    """OLMoE: one norm of all queries and one of all keys; some checkpoints clamp queries, keys and values."""

    inner = "intermediate_size"

    def is_mixture(self, i: int) -> bool:
        return True

    def attention(self, i: int) -> nn.Module:
        bias, clip = self.cfg.attention_bias, self.cfg.get("clip_qkv")
        options = {"qkv_bias": bias, "o_bias": bias, "full_qk_norm": True}
        if clip is None:
            return SelfAttention(self.cfg, i, **options)
        return ClippedAttention(self.cfg, i, clip, **options)


class MiniMaxM2(Mixture):
    """MiniMax M2: one norm of all queries and one of all keys; a sigmoid router whose bias changes the choice alone."""

    def attention(self, i: int) -> nn.Module:
        return SelfAttention(self.cfg, i, full_qk_norm=True)

    def mixture(self) -> nn.Module:
        how = self.routing()._replace(score="sigmoid")
        router = Router(
            self.cfg.hidden_size, self.cfg.num_experts, how, correction="e_score_correction_bias"
        )
        return MoE(router, self.experts(names=W123))


class Glm4Moe(Mixture):
    """GLM 4.5 and 4.6, and models with the router of DeepSeek V3 over grouped-query attention."""

    block, inner = "mlp", "moe_intermediate_size"

    def is_mixture(self, i: int) -> bool:
        return bool(i >= self.cfg.first_k_dense_replace)

    def attention(self, i: int) -> nn.Module:
        cfg = self.cfg
        return SelfAttention(cfg, i, qkv_bias=cfg.attention_bias, qk_norm=cfg.use_qk_norm)

    def routing(self) -> Routing:
        cfg = self.cfg
        return Routing(
            cfg.num_experts_per_tok, "sigmoid", cfg.norm_topk_prob, 1e-20, cfg.routed_scaling_factor,
            groups=cfg.n_group, top_groups=cfg.topk_group,
        )  # fmt: skip

    def mixture(self) -> nn.Module:
        cfg = self.cfg
        router = self.router(correction="gate.e_score_correction_bias", float32=True)
        width = cfg.moe_intermediate_size * (cfg.n_shared_experts or 0)
        return MoE(router, self.experts(), GatedMLP(cfg, width=width) if width else None)


class Dots1(Glm4Moe):
    """dots.llm1: norms of heads, and windows in the last layers."""

    def attention(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        return SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, qk_norm=True, window=cfg.window(i))


class PhiMoe(Mixture):
    """Phi-3.5-MoE: norms, projections and head with biases, and the sparsemixer router."""

    def norm(self, size: int) -> Norm:
        return LayerNorm(size, eps=self.cfg.rms_norm_eps, bias=True)

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, bias=cfg.lm_head_bias)

    def attention(self, i: int) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        return SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, window=cfg.get("sliding_window"))

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok, jitter=self.cfg.router_jitter_noise)


class GraniteMoe(Mixture, Granite):
    """Granite 3 MoE: one tensor for all experts, and the multipliers of Granite."""

    def decoder_layer(self, i: int, mlp: nn.Module) -> nn.Module:
        cfg, bias = self.cfg, self.cfg.attention_bias
        scale = cfg.attention_multiplier
        attention = SelfAttention(cfg, i, qkv_bias=bias, o_bias=bias, scale=scale)
        layer = DecoderLayer(cfg, attention, mlp, residual_scale=cfg.residual_multiplier)
        layer.checkpoint_names = {"mlp": self.block}
        return layer

    def routing(self) -> Routing:
        return Routing(self.cfg.num_experts_per_tok, "logits", rounds=True)

    def mixture(self) -> nn.Module:
        stacked = ("input_linear.weight", "output_linear.weight")
        experts = self.experts(stacked=stacked)
        return MoE(self.router(), experts, checkpoint_names={"gate": "router.layer"})


class ErnieMoe(Mixture):
    """ERNIE 4.5 with experts, in layers from the first to the last that config.json names."""

    block, inner = "mlp", "moe_intermediate_size"

    def is_mixture(self, i: int) -> bool:
        cfg, last = self.cfg, self.cfg.get("moe_layer_end_index", -1)
        inside = cfg.moe_layer_start_index <= i <= (last if last >= 0 else i)
        return inside and (i + 1) % cfg.moe_layer_interval == 0

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, bias=cfg.use_bias)

    def layer(self, i: int) -> nn.Module:
        mlp = self.mixture() if self.is_mixture(i) else GatedMLP(self.cfg, bias=self.cfg.use_bias)
        return self.decoder_layer(i, mlp)

    def attention(self, i: int) -> nn.Module:
        bias = self.cfg.use_bias
        return SelfAttention(self.cfg, i, qkv_bias=bias, o_bias=bias, interleaved=True)

    def mixture(self) -> nn.Module:
        cfg = self.cfg
        router = self.router(correction="moe_statics.e_score_correction_bias", float32=True)
        width = cfg.moe_intermediate_size * cfg.moe_num_shared_experts
        shared = GatedMLP(cfg, width=width, bias=cfg.use_bias) if width else None
        return MoE(router, self.experts(), shared)
