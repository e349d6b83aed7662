"""DeepSeek-V2 and -V3 and their neighbours: latent attention, and routed experts beside shared ones."""

from __future__ import annotations

from torch import nn

from quire.layers.decoder_layer import DecoderLayer, GatedMLP
from quire.layers.mla import LatentAttention
from quire.layers.moe import Experts, MoE, Router
from quire.models.base import CausalLM
from quire.ops.experts import Routing


class DeepseekV2(CausalLM):
    """V2 and V2-Lite: experts by the softmax of all scores, in V2 among the best groups only."""

    def layer(self, i: int) -> nn.Module:
        interleaved = self.cfg.get("rope_interleave", True)
        attention = LatentAttention(self.cfg, i, interleaved=interleaved)
        mlp = GatedMLP(self.cfg) if self.is_dense(i) else self.moe()
        return DecoderLayer(self.cfg, attention, mlp)

    def is_dense(self, i: int) -> bool:
        """Whether layer i has an MLP in place of experts."""
        return bool(i < self.cfg.get("first_k_dense_replace", 0))

    def moe(self) -> nn.Module:
        cfg = self.cfg
        count, width = cfg.n_routed_experts, cfg.moe_intermediate_size
        shared = cfg.get("n_shared_experts", 0)
        return MoE(
            self.router(),
            Experts(cfg.hidden_size, width, count, act=cfg.hidden_act),
            GatedMLP(cfg, width=width * shared) if shared else None,
        )

    def router(self) -> Router:
        cfg, groups = self.cfg, {}
        if cfg.get("topk_method") == "group_limited_greedy":
            groups = {"groups": cfg.n_group, "top_groups": cfg.topk_group}
        how = Routing(
            cfg.num_experts_per_tok, "softmax", renormalize=False, scale=cfg.get("routed_scaling_factor", 1.0),
            group_score="max", **groups,
        )  # fmt: skip
        return Router(cfg.hidden_size, cfg.n_routed_experts, how, float32=True)


class DeepseekV3(DeepseekV2):
    """V3, R1 and Kimi-K2: experts by sigmoids, whose choice a bias corrects."""

    def router(self) -> Router:
        cfg = self.cfg
        how = Routing(
            cfg.num_experts_per_tok, "sigmoid", renormalize=cfg.get("norm_topk_prob", True), eps=1e-20,
            scale=cfg.get("routed_scaling_factor", 1.0), groups=cfg.get("n_group", 1), top_groups=cfg.get("topk_group", 1),
        )  # fmt: skip
        correction = "gate.e_score_correction_bias"
        return Router(
            cfg.hidden_size, cfg.n_routed_experts, how, correction=correction, float32=True
        )


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: as DeepSeek-V3; the first layer alone is dense, unless `mlp_layer_types` says otherwise."""

    def is_dense(self, i: int) -> bool:
        types = self.cfg.get("mlp_layer_types")
        return types[i] == "dense" if types else i == 0
