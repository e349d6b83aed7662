"""Gemma 4: layers of two head sizes, of which the last may share keys and values; embeddings for each layer; experts beside
the MLP.

Shape suffixes: T tokens, H heads, D features, L layers, P features of a layer's embedding.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.forward_context import current_batch
from quire.layers.attention import Attention
from quire.layers.decoder import Decoder
from quire.layers.decoder_layer import SANDWICH, DecoderLayer, GatedMLP, SelfAttention, normed_sum
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.moe import Experts, ScaledRouter
from quire.layers.native_parts import AttentionParts
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles
from quire.layers.weight_slots import Layer
from quire.models.gemma import Gemma2
from quire.models.hf_config import TextConfig
from quire.ops.experts import Routing
from quire.ops.reference import act_and_mul, rms_norm, rotate

PER_LAYER = "per_layer_input_TLP"
"""Name among the batch's extra tensors."""


def geometry(cfg: TextConfig, i: int) -> tuple[int, int]:
    """Head size and number of KV heads of layer i."""
    sizes = {"head_dim": cfg.head_dim, "num_key_value_heads": cfg.num_key_value_heads}
    if cfg.layer_types[i] == "full_attention":
        sizes["head_dim"] = cfg.get("global_head_dim", 512)
        if cfg.attention_k_eq_v and cfg.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = cfg.num_global_key_value_heads
    if (by_layer := cfg.get("per_layer_config")) is not None:  # Transformers 5
        sizes = {**sizes, "head_dim": cfg.head_dim, **by_layer.get(str(i), {})}
    return sizes["head_dim"], sizes["num_key_value_heads"]


class Gemma4Attention(SelfAttention):
    """Norms of queries, keys and values, the last without a weight; scores are not scaled.

    Full layers may have no `v_proj`: their values are their keys before norm and rotation. With `shared`, an earlier
    layer's attention, there are only queries.
    """

    def __init__(self, cfg: TextConfig, i: int, shared: Attention | None):
        size, kv_heads = geometry(cfg, i)
        bias, window = cfg.attention_bias, cfg.window(i)
        super().__init__(
            cfg, i, head_dim=size, kv_heads=kv_heads, qkv_bias=bias, o_bias=bias, qk_norm=True,
            window=window, scale=1.0, shared=shared,
        )  # fmt: skip
        self.eps = cfg.rms_norm_eps
        count = 3 - (cfg.attention_k_eq_v and cfg.layer_types[i] == "full_attention")
        count = 1 if shared is not None else count
        self.sizes = self.sizes[:count]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=False))
        own = [share.times(self.size) for share in self.shares[:count]]
        self.qkv = Linear(cfg.hidden_size, parts, bias=bias, shares=own)
        if shared is not None:
            self.k_norm = None

    def native(self) -> AttentionParts:
        """See `AttentionParts`."""
        return AttentionParts(self, value_norm_eps=self.eps)

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        q, *kv = self.qkv(x_TD).split(self.sizes, -1)
        q_THD = q.unflatten(-1, (self.heads, self.size))
        q_THD = rotate(self.q_norm(q_THD), *angles)  # type: ignore[misc]
        if self.k_norm is None:
            return self.o_proj(self.attn(q_THD).flatten(-2))
        k_THD, v_THD = (part.unflatten(-1, (self.kv_heads, self.size)) for part in (kv[0], kv[-1]))
        v_THD = rms_norm(v_THD, None, self.eps)
        k_THD = rotate(self.k_norm(k_THD), *angles)
        return self.o_proj(self.attn(q_THD, k_THD, v_THD).flatten(-2))


class Gemma4Layer(DecoderLayer, Layer):
    """As Gemma 3's; then a branch that reads the layer's own embedding of each token; then a scale of everything."""

    layer_scalar: Tensor
    random_mean = 1.0

    def __init__(self, cfg: TextConfig, i: int, attention: nn.Module, mlp: nn.Module):
        super().__init__(cfg, attention, mlp, norms=SANDWICH)
        self.index, self.act, size = i, cfg.hidden_act, cfg.get("hidden_size_per_layer_input", 0)
        self.has_branch = bool(size)
        self.new("layer_scalar", 1)
        if size:
            self.per_layer_input_gate = Linear(cfg.hidden_size, size)
            self.per_layer_projection = Linear(size, cfg.hidden_size)
            self.post_per_layer_input_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def finish(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        if self.has_branch:
            residual_TD = residual_TD + x_TD
            own_TP = current_batch().extras[PER_LAYER][:, self.index]
            gate_TP = self.per_layer_input_gate(residual_TD)
            gated_TP = act_and_mul(torch.cat((gate_TP, own_TP), -1), self.act)
            x_TD = self.post_per_layer_input_norm(self.per_layer_projection(gated_TP))
        return x_TD * self.layer_scalar, residual_TD * self.layer_scalar


class Gemma4MoeLayer(Gemma4Layer):
    """Experts beside the MLP; their router reads the residual."""

    def __init__(self, cfg: TextConfig, i: int, attention: nn.Module, mlp: nn.Module):
        super().__init__(cfg, i, attention, mlp)
        size, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.router = ScaledRouter(size, cfg.num_experts, Routing(cfg.top_k_experts), eps)
        self.experts = Experts(size, cfg.moe_intermediate_size, cfg.num_experts, act=self.act)
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps)

    def mlp_sublayer(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = normed_sum(self.norms.mlp_in, x_TD, residual_TD)
        y_TD = self.post_feedforward_layernorm_1(self.mlp(x_TD))
        x_TD = self.experts(
            self.pre_feedforward_layernorm_2(residual_TD), *self.router(residual_TD)
        )
        y_TD = y_TD + self.post_feedforward_layernorm_2(x_TD)
        return self._output(self.norms.mlp_out, y_TD), residual_TD


class Gemma4Decoder(Decoder):
    """A decoder with an embedding table that has a part for each layer."""

    def __init__(self, cfg: TextConfig, *args: Any, **options: Any):
        super().__init__(cfg, *args, **options)
        size, layers = cfg.hidden_size_per_layer_input, cfg.num_hidden_layers
        if cfg.vocab_size_per_layer_input < cfg.vocab_size:
            raise ConfigError(
                f"vocab_size_per_layer_input={cfg.vocab_size_per_layer_input} in config.json: the"
                f" vocabulary has {cfg.vocab_size} tokens, and each needs an embedding for each layer"
            )
        words = cfg.vocab_size_per_layer_input
        self.embed_tokens_per_layer = Embedding(words, layers * size, scale=size**0.5, splits=True)
        self.per_layer_model_projection = Linear(cfg.hidden_size, layers * size)
        self.per_layer_projection_norm = RMSNorm(size, cfg.rms_norm_eps)
        self.shape, self.factor = (layers, size), cfg.hidden_size**-0.5

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        batch = current_batch()
        own = self.embed_tokens_per_layer(batch.token_ids_T)
        projected = self.per_layer_model_projection(embeddings_TD) * self.factor
        context_TLP = self.per_layer_projection_norm(projected.unflatten(-1, self.shape))
        batch.extras[PER_LAYER] = (context_TLP + own.unflatten(-1, self.shape)) * 0.5**0.5
        hidden_TD = super().forward(embeddings_TD, positions)
        del batch.extras[PER_LAYER]
        return hidden_TD


class Gemma4(Gemma2):
    """The text model."""

    def decoder(self, cfg: TextConfig, max_length: int) -> Decoder:
        self.attentions: list[Gemma4Attention] = []
        kind = Gemma4Decoder if cfg.get("hidden_size_per_layer_input") else Decoder
        sizes = [geometry(cfg, i)[0] for i in range(cfg.num_hidden_layers)]
        return kind(
            cfg, self.layer, max_length, norm=self.norm(cfg.hidden_size),
            embedding_scale=self.embedding_scale(cfg), head_dim=sizes,
        )  # fmt: skip

    def why_uncut(self, cfg: TextConfig) -> str:
        if cfg.get("hidden_size_per_layer_input"):
            return "each layer reads its own embedding of each token"
        shares = cfg.get("num_kv_shared_layers", 0)
        return "layers share the keys and values of earlier ones" if shares else ""

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.cfg.rms_norm_eps)

    def layer(self, i: int) -> nn.Module:
        cfg, first = self.cfg, self.first_shared
        shared = i >= first
        attention = Gemma4Attention(cfg, i, self._source(i).attn if shared else None)
        self.attentions.append(attention)
        width = cfg.intermediate_size * (2 if shared and cfg.use_double_wide_mlp else 1)
        kind = Gemma4MoeLayer if cfg.enable_moe_block else Gemma4Layer
        return kind(cfg, i, attention, GatedMLP(cfg, width=width))

    @property
    def first_shared(self) -> int:
        """The first layer that shares keys and values of an earlier one."""
        return int(self.cfg.num_hidden_layers - self.cfg.get("num_kv_shared_layers", 0))

    def _source(self, i: int) -> Gemma4Attention:
        """The last layer of the same type that has keys and values. Raises ConfigError: there is none."""
        types = self.cfg.layer_types
        found = [k for k in range(self.first_shared) if types[k] == types[i]]
        if not found:
            raise ConfigError(
                f"num_kv_shared_layers={self.cfg.num_kv_shared_layers} in config.json: no layer of type"
                f" {types[i]} has keys and values for layer {i}; the file may be damaged"
            )
        return self.attentions[found[-1]]

    def ignores(self, name: str) -> bool:
        """Keys and values of the layers that share others'."""
        found = re.match(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.", name)
        return found is not None and int(found[1]) >= self.first_shared
