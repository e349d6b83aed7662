"""Zamba2: Mamba-2 in every layer, and before some of them one of few transformers that these layers share.

A shared transformer reads the layer's input beside the embeddings; each of its uses has low-rank adapters and a KV cache
of its own, and its output is added to the input of Mamba-2 alone.

Shape suffixes: T tokens, D features, H heads, K key heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.forward_context import current_batch
from quire.layers.attention import Attention
from quire.layers.decoder import Decoder
from quire.layers.decoder_layer import MixerLayer
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles
from quire.models.base import CausalLM
from quire.models.hf_config import TextConfig
from quire.models.mamba_hybrids import mamba2, named
from quire.ops.reference import gelu_and_mul, rotate

EMBEDDINGS = "zamba2_embeddings_TD"
"""Key of the step's embeddings in `ForwardBatch.extras`."""


def adapters(uses: Iterable[int], ins: int, rank: int, outs: int) -> nn.ModuleDict:
    """A low-rank product for each use of a shared transformer."""
    return nn.ModuleDict(
        {str(use): nn.Sequential(Linear(ins, rank), Linear(rank, outs)) for use in uses}
    )


class SharedAttention(nn.Module):
    """Attention whose products have an adapter for each use."""

    def __init__(self, cfg: TextConfig, uses: Iterable[int]):
        super().__init__()
        width, size = 2 * cfg.hidden_size, cfg.head_dim
        self.size, self.rope = size, cfg.get("use_mem_rope", False)
        self.sizes = [cfg.num_attention_heads * size, *[cfg.num_key_value_heads * size] * 2]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv = Linear(width, parts, packed="qkv_proj")
        self.o_proj = Linear(self.sizes[0], cfg.hidden_size)
        if cfg.get("use_shared_attention_adapter", False):
            for part, outs in zip("qkv", self.sizes, strict=True):
                product = adapters(uses, width, cfg.adapter_rank, outs)
                self.register_module(f"linear_{part}_adapter_list", product)

    def forward(self, x_TD: Tensor, angles: Angles, attn: Attention, use: int) -> Tensor:
        parts = list(self.qkv(x_TD).split(self.sizes, -1))
        for i, part in enumerate("qkv"):
            lists: Any = self._modules.get(f"linear_{part}_adapter_list")
            parts[i] = parts[i] if lists is None else parts[i] + lists[str(use)](x_TD)
        q_THD, k_TKD, v_TKD = (part.unflatten(-1, (-1, self.size)) for part in parts)
        if self.rope:
            q_THD, k_TKD = rotate(q_THD, *angles), rotate(k_TKD, *angles)
        return self.o_proj(attn(q_THD, k_TKD, v_TKD).flatten(-2))


class SharedMLP(nn.Module):
    """A gated MLP with gelu, whose first product has an adapter for each use."""

    def __init__(self, cfg: TextConfig, uses: Iterable[int]):
        super().__init__()
        hidden, inner, bias = (
            cfg.hidden_size,
            cfg.intermediate_size,
            cfg.get("add_bias_linear", False),
        )
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.gate_up_proj_adapter_list = adapters(uses, hidden, cfg.adapter_rank, 2 * inner)

    def forward(self, x_TD: Tensor, use: int) -> Tensor:
        adapter = self.gate_up_proj_adapter_list[str(use)]
        return self.down_proj(gelu_and_mul(self.gate_up_proj(x_TD) + adapter(x_TD)))


class SharedTransformer(nn.Module):
    """Norm, attention, norm and MLP, without residuals; `uses`: numbers of the hybrid layers that use it."""

    def __init__(self, cfg: TextConfig, uses: Iterable[int]):
        super().__init__()
        uses = list(uses)
        self.input_layernorm = RMSNorm(2 * cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = SharedAttention(cfg, uses)
        self.pre_ff_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.feed_forward = SharedMLP(cfg, uses)

    def forward(self, x_TD: Tensor, angles: Angles, attn: Attention, use: int) -> Tensor:
        both_TD = torch.cat((x_TD, current_batch().extras[EMBEDDINGS]), -1)
        y_TD = self.self_attn(self.input_layernorm(both_TD), angles, attn, use)
        return self.feed_forward(self.pre_ff_layernorm(y_TD), use)


class SharingLayer(nn.Module):
    """A use of a shared transformer, and Mamba-2. The first use owns the transformer's weights."""

    def __init__(
        self,
        cfg: TextConfig,
        layer: int,
        use: int,
        transformer: SharedTransformer,
        mamba: MixerLayer,
    ):
        super().__init__()
        self.use, self.shared = use, [transformer]  # a list is no submodule
        if use < cfg.get("num_mem_blocks", 1):
            self.shared_transformer = transformer
        scale = (cfg.head_dim / 2) ** -0.5
        heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        self.attn = Attention(heads, kv_heads, cfg.head_dim, scale=scale, layer_index=layer)
        self.linear = Linear(cfg.hidden_size, cfg.hidden_size)
        self.mamba_decoder = mamba

    def forward(
        self, x_TD: Tensor, residual_TD: Tensor | None, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        total_TD = x_TD if residual_TD is None else x_TD + residual_TD
        shared_TD = self.linear(self.shared[0](total_TD, angles, self.attn, self.use))
        mamba = self.mamba_decoder
        return mamba.mixer(mamba.norm(total_TD + shared_TD)), total_TD


class EmbeddingDecoder(Decoder):
    """A decoder whose layers find the embeddings in the batch."""

    def forward(self, embeddings_TD: Tensor, positions: Tensor) -> Tensor:
        current_batch().extras[EMBEDDINGS] = embeddings_TD.clone()
        return super().forward(embeddings_TD, positions)


class Zamba2(CausalLM):
    """Zamba2 1.2B, 2.7B and 7B."""

    decoder_names: ClassVar = {"norm": "final_layernorm"}
    decoder_class = EmbeddingDecoder

    def why_uncut(self, cfg: TextConfig) -> str:
        return "layers share transformers, which read the embeddings"

    def layer(self, i: int) -> nn.Module:
        cfg = self.cfg
        bias, conv_bias = cfg.get("add_bias_linear", False), cfg.get("use_conv_bias", True)
        mixer = mamba2(cfg, bias=bias, conv_bias=conv_bias)
        mamba = MixerLayer(mixer, self.norm(cfg.hidden_size))
        named(mamba, norm="input_layernorm", mixer="mamba")
        if cfg.layer_type(i) != "hybrid":
            return mamba
        sharing = [j for j, kind in enumerate(cfg.layer_types) if kind == "hybrid"]
        use, blocks = sharing.index(i), cfg.get("num_mem_blocks", 1)
        return SharingLayer(
            cfg, i, use, self.transformer(use % blocks, len(sharing), blocks), mamba
        )

    def ignores(self, name: str) -> bool:
        """Whether it is of a later use of a shared transformer: it equals the first use's."""
        return ".shared_transformer." in name

    def transformer(self, block: int, uses: int, blocks: int) -> SharedTransformer:
        """The shared transformer with this number, made at its first use."""
        transformers: dict[int, SharedTransformer] = self.__dict__.setdefault("transformers", {})
        if block not in transformers:
            transformers[block] = SharedTransformer(self.cfg, range(block, uses, blocks))
        return transformers[block]
