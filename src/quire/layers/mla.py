"""Multi-head latent attention (MLA) of DeepSeek-V2 and -V3, absorbed: all heads attend over one latent vector a token.

Keys and values of a head are products of its own matrices and the latent vector. The layer multiplies queries by the key
matrices and results by the value matrices instead, so the KV cache has the latent vector and one rotated key, and a step
computes the same for any number of new tokens.
Ranks have some of the heads each, and all of them the whole latent vector.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
Shape suffixes: T tokens, H heads, D features, I inputs and O outputs of a head's matrix, R size of the latent vector,
N features of a query without positions, P features with, E size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import Angles
from quire.layers.weight_slots import Layer, Slot, StackedSlot, WeightSlot
from quire.layers.weights import WeightRef
from quire.ops.experts import HeadWeights, per_head
from quire.ops.reference import rotate
from quire.parallel.ranks import OutputSlice, head_slices

NORM_EPS = 1e-6
"""Of the norms inside the layer, whatever `rms_norm_eps` says."""


class HeadsSlot(StackedSlot):
    """The destination of `kv_b_proj`, [H * (N + E), R]: of each head, the key matrix, transposed, and the value matrix; this rank has
    some of the heads."""

    def __init__(
        self, keys: Sequence[WeightSlot], values: Sequence[WeightSlot], heads: OutputSlice
    ):
        super().__init__([*keys, *values])
        self.keys, self.values, self.heads = keys, values, heads

    def shape(self) -> tuple[int, ...]:
        """The shape in checkpoints."""
        (latent, nope), (value, _) = self.keys[0].shape(), self.values[0].shape()
        return (self.heads.total * (nope + value), latent)

    def fill(self, tensor: Tensor, device: torch.device, called: str) -> None:
        """Fill all matrices; see `WeightSlot.fill`."""
        if tuple(tensor.shape) != self.shape():
            raise ConfigError(
                f"weight {called} has shape {list(tensor.shape)}, but config.json requires {list(self.shape())}"
            )
        by_head = tensor.unflatten(0, (self.heads.total, -1))[self.heads.start :]
        nope = self.keys[0].shape()[1]
        for one, key, value in zip(by_head, self.keys, self.values, strict=False):
            for slot, part in ((key, one[:nope].T), (value, one[nope:])):
                slot._replace(dim=0, length=len(part)).fill(part, device, called)


class LatentProjections(Layer):
    """The key and value matrices of heads: products of one head's vectors with its own matrix."""

    may_defer = True

    def __init__(self, heads: OutputSlice, latent: int, nope: int, value: int):
        super().__init__()
        self.heads, numbers = heads, range(heads.length)
        self.keys = [WeightRef(self, nope, latent, prefix=f"key_{h}_") for h in numbers]
        self.values = [WeightRef(self, latent, value, prefix=f"value_{h}_") for h in numbers]
        self._of_keys, self._of_values = HeadWeights(self.keys), HeadWeights(self.values)

    def weights(self) -> Iterable[WeightRef]:
        return (*self.keys, *self.values)

    def slots(self, path: str) -> dict[str, Slot]:
        """See `Layer.slots`."""
        keys, values = (
            [WeightSlot(self, ref.prefix + "weight", ref=ref) for ref in refs]
            for refs in (self.keys, self.values)
        )
        return {f"{path}.weight": HeadsSlot(keys, values, self.heads)}

    def absorb(self, q_THN: Tensor) -> Tensor:
        """Queries as vectors that are multiplied by the latent vector: q_THR."""
        return per_head(q_THN, self._of_keys)

    def expand(self, o_THR: Tensor) -> Tensor:
        """Weighted sums of latent vectors as sums of values: o_THE."""
        return per_head(o_THR, self._of_values)


class LatentAttention(nn.Module):
    """MLA with rotary positions on a part of each query and on one key that all heads share.

    Args:
        cfg: the model's `TextConfig`: `q_lora_rank` (may be null), `kv_lora_rank`, `qk_nope_head_dim`,
            `qk_rope_head_dim`, `v_head_dim`.
        layer: which layer of the model.
        interleaved: rotates pairs of adjacent features, instead of pairs half a head apart.
    """

    def __init__(self, cfg: Any, layer: int, *, interleaved: bool = True):
        super().__init__()
        count: int = cfg.num_attention_heads
        shares = head_slices(count, count)[:1]
        share = shares[0] if shares else OutputSlice(0, count, count)
        self.heads, self.latent = share.length, cfg.kv_lora_rank
        self.nope, self.turning = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        bias, hidden, size = cfg.attention_bias, cfg.hidden_size, self.nope + self.turning
        self.interleaved, rank = interleaved, cfg.get("q_lora_rank")
        own = [each.times(size) for each in shares]
        if rank:
            self.q_a_proj = Linear(hidden, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, NORM_EPS)
            self.q_b_proj = Linear(rank, self.heads * size, shares=own)
        else:
            self.q_proj = Linear(hidden, self.heads * size, shares=own)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent + self.turning, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent, NORM_EPS)
        self.kv_b_proj = LatentProjections(share, self.latent, self.nope, cfg.v_head_dim)
        self.o_proj = Linear(count * cfg.v_head_dim, hidden, bias=bias, gathers=bool(shares))
        self.attn = Attention(
            self.heads, 1, self.latent + self.turning, v_head_dim=self.latent, latent=True,
            scale=size**-0.5 * score_factor(cfg.rope(layer)), layer_index=layer,
        )  # fmt: skip

    def forward(self, x_TD: Tensor, angles: Angles) -> Tensor:
        q_THD = self.queries(x_TD).unflatten(-1, (self.heads, -1))
        q_THN, q_THP = q_THD.split((self.nope, self.turning), -1)
        latent_TR, k_TP = self.kv_a_proj_with_mqa(x_TD).split((self.latent, self.turning), -1)
        latent_T1R = self.kv_a_layernorm(latent_TR.contiguous())[:, None]
        q_THP = rotate(q_THP.contiguous(), *angles, self.interleaved)
        k_T1P = rotate(k_TP[:, None].contiguous(), *angles, self.interleaved)
        q_THD = torch.cat((self.kv_b_proj.absorb(q_THN), q_THP), -1)
        k_T1D = torch.cat((latent_T1R, k_T1P), -1)
        o_THR = self.attn(q_THD, k_T1D, latent_T1R)
        return self.o_proj(self.kv_b_proj.expand(o_THR).flatten(-2))

    def queries(self, x_TD: Tensor) -> Tensor:
        """The queries of all heads, [T, H * (N + P)]."""
        if hasattr(self, "q_proj"):
            return self.q_proj(x_TD)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))


def score_factor(rope: dict[str, Any]) -> float:
    """The factor of scores that a stretched context brings (YaRN's `mscale_all_dim`)."""
    scale = rope.get("mscale_all_dim")
    if not scale or rope["rope_type"] == "default" or rope["factor"] <= 1:
        return 1.0
    return float(0.1 * scale * math.log(rope["factor"]) + 1.0) ** 2
