"""Attention and Mamba layers in turn, each with an MLP: Bamba, Granite 4 H, Jamba."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP, SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.moe import Experts, MoE, Router
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes, MambaMixer
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.ops.experts import Routing

NORMS = ("input_layernorm", None, "pre_ff_layernorm", None)


def mamba2(cfg: TextConfig, inner: int | None = None, **options: Any) -> Mamba2Mixer:
    """The Mamba-2 layer of a hybrid; `inner`: the size of its heads together, if config.json has it."""
    heads, size = cfg.mamba_n_heads, cfg.get("mamba_d_head", "auto")
    if size == "auto":
        size = (inner or int(cfg.get("mamba_expand", 2) * cfg.hidden_size)) // heads
    sizes = Mamba2Sizes(
        heads, size, cfg.get("mamba_n_groups", 1), cfg.mamba_d_state, cfg.get("mamba_d_conv", 4)
    )
    usual = {
        "bias": cfg.get("mamba_proj_bias", False),
        "conv_bias": cfg.get("mamba_conv_bias", True),
        "limits": cfg.get("time_step_limit"),
    }
    return Mamba2Mixer(cfg.hidden_size, sizes, cfg.rms_norm_eps, **{**usual, **options})


class Bamba(CausalLM):
    """Mamba-2, and attention with partial rotary positions in the layers `attn_layer_indices`."""

    decoder_names: ClassVar = {"norm": "final_layernorm"}

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        mlp = GatedMLP(cfg, bias=cfg.mlp_bias)
        if i in cfg.get("attn_layer_indices", ()):
            attention = SelfAttention(
                cfg, i, qkv_bias=cfg.attention_bias, o_bias=cfg.attention_bias
            )
            return named(DecoderLayer(cfg, attention, mlp, norms=NORMS), mlp="feed_forward")
        layer = DecoderLayer(cfg, mamba2(cfg), mlp, norms=NORMS)
        return named(layer, self_attn="mamba", mlp="feed_forward")


def named(module: Any, **names: str) -> Any:
    """The module, with these names of its parts in checkpoints."""
    module.checkpoint_names = {**getattr(module, "checkpoint_names", {}), **names}
    return module


class GraniteHybrid(CausalLM):
    """Granite 4 H: factors of embeddings, residuals, scores and logits; experts beside a shared MLP, or that alone."""

    scales_after_lookup = True

    def embedding_scale(self, cfg: TextConfig) -> float | None:
        return cfg.get("embedding_multiplier")

    def head(self, cfg: TextConfig, tied: Embedding | None) -> Head:
        scale = 1 / cfg.get("logits_scaling", 1.0)
        return Head(cfg.vocab_size, cfg.hidden_size, tied=tied, scale=scale)

    def layer(self, i: int) -> nn.Module:
        cfg, mixer, names = self.cfg, self.mixer(i), {"mlp": "shared_mlp"}
        names_in_file = ("gate_proj", "up_proj", "input_linear", "output_linear")
        width = cfg.get("shared_intermediate_size", 0)
        mlp: nn.Module = GatedMLP(cfg, width=width, names=names_in_file)
        if count := cfg.get("num_local_experts", 0):
            hidden, routing = cfg.hidden_size, Routing(cfg.num_experts_per_tok, score="logits")
            stacked = ("input_linear.weight", "output_linear.weight")
            experts = Experts(hidden, cfg.intermediate_size, count, stacked=stacked)
            shared, router = mlp if width else None, Router(hidden, count, routing)
            mlp, names = MoE(router, experts, shared), {"mlp": ""}
            block = "block_sparse_moe"
            named(
                mlp, gate=f"{block}.router.layer", experts=f"{block}.experts", shared="shared_mlp"
            )
        if isinstance(mixer, Mamba2Mixer):
            names["self_attn"] = "mamba"
        scale = cfg.get("residual_multiplier", 1.0)
        return named(DecoderLayer(cfg, mixer, mlp, residual_scale=scale), **names)

    def mixer(self, i: int) -> nn.Module:
        """Mamba-2 or attention."""
        cfg = self.cfg
        if cfg.layer_type(i) == "linear_attention":
            return mamba2(cfg)
        rope, bias = cfg.get("position_embedding_type") == "rope", cfg.attention_bias
        scale = cfg.get("attention_multiplier", 1.0)
        return SelfAttention(cfg, i, scale=scale, rope=rope, qkv_bias=bias, o_bias=bias)


class Jamba(CausalLM):
    """Mamba-1 with norms of step, B and C; attention without positions; experts in some layers."""

    decoder_names: ClassVar = {"norm": "final_layernorm"}

    def layer(self, i: int) -> nn.Module:
        cfg, names = self.cfg, {"mlp": "feed_forward"}
        if i % cfg.get("attn_layer_period", 8) == cfg.get("attn_layer_offset", 4):
            mixer: nn.Module = SelfAttention(cfg, i, rope=False)
        else:
            mixer, names["self_attn"] = self.mamba(), "mamba"
        return named(DecoderLayer(cfg, mixer, self.mlp(i), norms=NORMS), **names)

    def mlp(self, i: int) -> nn.Module:
        """Experts, or one MLP."""
        cfg = self.cfg
        routed = i % cfg.get("expert_layer_period", 2) == cfg.get("expert_layer_offset", 1)
        if not routed or cfg.num_experts <= 1:
            return GatedMLP(cfg)
        routing = Routing(cfg.num_experts_per_tok, renormalize=False)
        experts = Experts(cfg.hidden_size, cfg.intermediate_size, cfg.num_experts)
        router = Router(cfg.hidden_size, cfg.num_experts, routing)
        return MoE(router, experts, checkpoint_names={"gate": "router"})

    def mamba(self) -> MambaMixer:
        cfg = self.cfg
        rank = cfg.get("mamba_dt_rank", "auto")
        return MambaMixer(
            *(cfg.hidden_size, cfg.get("mamba_expand", 2) * cfg.hidden_size, cfg.mamba_d_state),
            -(-cfg.hidden_size // 16) if rank == "auto" else rank,
            cfg.get("mamba_d_conv", 4),
            bias=cfg.get("mamba_proj_bias", False),
            conv_bias=cfg.get("mamba_conv_bias", True),
            norm_eps=cfg.rms_norm_eps,
            norm_names=("dt_layernorm", "b_layernorm", "c_layernorm"),
        )
