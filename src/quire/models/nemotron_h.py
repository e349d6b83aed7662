"""Nemotron-H: each layer is one of Mamba-2, attention, an MLP or a mixture of experts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.decoder_layer import MixerLayer, SelfAttention
from quire.layers.linear import Linear
from quire.layers.moe import Experts, MoE, Router
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.models.mamba import BACKBONE
from quire.models.mamba_hybrids import mamba2
from quire.ops.experts import Routing
from quire.parallel.ranks import output_slices


class SquaredMLP(nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, hidden: int, inner: int, bias: bool):
        super().__init__()
        shares = output_slices(inner)
        own = shares[0].length if shares else inner
        self.up_proj = Linear(hidden, own, bias=bias, shares=shares)
        self.down_proj = Linear(inner, hidden, bias=bias, gathers=bool(shares))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x_TD)).square())


class LatentExperts(nn.Module):
    """Experts between two projections, to a smaller size and back."""

    def __init__(self, hidden: int, latent: int, experts: Experts, bias: bool):
        super().__init__()
        self.fc1_latent_proj = Linear(hidden, latent, bias=bias)
        self.experts = experts
        self.fc2_latent_proj = Linear(latent, hidden, bias=bias)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x_TD), ids_TK, weights_TK))


class NemotronH(CausalLM):
    """Nemotron-H and Nemotron 3."""

    checkpoint_names: ClassVar = {"model": "backbone"}
    decoder_names: ClassVar = BACKBONE

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        kinds = cfg.get("layer_types") or cfg.get("hybrid_override_pattern")
        cfg.values["num_hidden_layers"] = len(kinds)
        super().__init__(cfg, max_length)

    def layer(self, i: int) -> nn.Module:
        return MixerLayer(self.mixer(i), self.norm(self.cfg.hidden_size))

    def mixer(self, i: int) -> nn.Module:
        """What layer i computes."""
        cfg, kind = self.cfg, self.cfg.layer_type(i)
        if kind == "linear_attention":
            bias, conv_bias = cfg.get("use_bias", False), cfg.get("use_conv_bias", True)
            return mamba2(cfg, bias=bias, conv_bias=conv_bias)
        if kind == "full_attention":
            return SelfAttention(cfg, i, rope=False)
        if kind == "mlp":
            return SquaredMLP(cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias)
        return self.mixture()

    def mixture(self) -> nn.Module:
        """Experts without gates, and a shared expert."""
        cfg, hidden = self.cfg, self.cfg.hidden_size
        routing = Routing(
            *(cfg.num_experts_per_tok, "sigmoid", cfg.norm_topk_prob, 1e-20, cfg.routed_scaling_factor),
            groups=cfg.n_group,
            top_groups=cfg.topk_group,
        )  # fmt: skip
        router = Router(
            hidden, cfg.n_routed_experts, routing, correction="gate.e_score_correction_bias", float32=True
        )  # fmt: skip
        latent = cfg.get("moe_latent_size")
        experts = Experts(
            latent or hidden, cfg.moe_intermediate_size, cfg.n_routed_experts, act="relu2"
        )
        shared = SquaredMLP(hidden, cfg.moe_shared_expert_intermediate_size, cfg.mlp_bias)
        if latent is None:
            return MoE(router, experts, shared)
        between = LatentExperts(hidden, latent, experts, cfg.mlp_bias)
        return MoE(router, between, shared, checkpoint_names={"experts": ""})
