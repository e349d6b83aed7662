"""MPNet: BERT without token types, whose scores have a bias by distance.

Shape suffixes: H heads, L distances (2 n - 1 of n positions).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layers.attention import PackedAttention
from quire.layers.decoder_layer import SelfAttention
from quire.layers.embedding import Embedding
from quire.layers.encoder import EncoderTables
from quire.models.encoder import EncoderModel
from quire.models.hf_config import TextConfig

OWN_BUCKET, ONE_BUCKET = 8, 128
"""Distances below the first have buckets of their own; from the second on they share one."""


class DistanceBias(Embedding):
    """A score by bucket of distances and head, as in T5 (arXiv 1910.10683), for tokens before and after."""

    def __init__(self, buckets: int, heads: int, length: int):
        super().__init__(buckets, heads)
        self.length = length
        self.table_HL: Tensor | None = None

    def by_distance(self) -> Tensor:
        """bias_HL, float32."""
        if self.table_HL is None or self.table_HL.device != self.weight.device:
            half = self.weight.shape[0] // 2
            distances_L = torch.arange(1 - self.length, self.length)
            apart_L = distances_L.abs()
            share_L = (apart_L.clamp(min=1).float() / OWN_BUCKET).log() / math.log(
                ONE_BUCKET / OWN_BUCKET
            )
            far_L = (OWN_BUCKET + (share_L * (half - OWN_BUCKET)).long()).clamp(max=half - 1)
            bucket_L = torch.where(apart_L < OWN_BUCKET, apart_L, far_L) + half * (distances_L > 0)
            self.table_HL = self.weight.detach()[bucket_L].T.float().contiguous()
        return self.table_HL


class BiasedAttention(PackedAttention):
    """With a bias that all layers share."""

    shared: tuple[DistanceBias, ...] = ()

    def bias_HL(self) -> Tensor | None:
        return self.shared[0].by_distance()


class MpNet(EncoderModel):
    """MPNet."""

    prefixes = ("mpnet.",)
    layer_names = ("attention", "attention.LayerNorm", "", "output.LayerNorm")
    attention_names = ("attn.q", "attn.k", "attn.v", "attn.qkv", "attn.o")

    def __init__(self, cfg: TextConfig, max_length: int = 0):
        heads, length = cfg.num_attention_heads, cfg.max_position_embeddings
        self.bias = (DistanceBias(cfg.relative_attention_num_buckets, heads, length),)
        super().__init__(cfg, max_length)
        self.model.relative_attention_bias = self.bias[0]
        names = {**self.names, "relative_attention_bias": "encoder.relative_attention_bias"}
        self.model.checkpoint_names = names

    def tables(self) -> EncoderTables:
        return super().tables()._replace(offset=2, types=0)

    def attention(self, i: int, *, bias: bool = True, window: int | None = None) -> SelfAttention:
        found = super().attention(i, bias=bias, window=window)
        found.attn = BiasedAttention(found.heads, found.kv_heads, found.size)
        found.attn.shared = self.bias
        return found
