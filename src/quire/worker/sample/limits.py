"""Which tokens survive top-k, top-p and min-p: as one threshold a row.

Knows scaled logits and three numbers a row. Does not know seeds or requests. In this order:

    min-p    tokens at least min_p times as likely as the likeliest
    top-k    of these, the k likeliest
    top-p    of these, the fewest likeliest whose share (among them) reaches p

Each keeps the tokens whose logit is not below some value, so all three together are one value a row, and
tokens of equal logits live or die together: the order of a sort does not matter. Shares are counted in
integers (weight = floor(2^40 * exp(logit - max))), so that sums do not depend on their order, nor on how many
rows are summed at once.

Shape suffixes: S rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.worker.sample.draw import draw_among

SPARE = 64  # candidates beyond top-k, for tokens that tie with the last one
USUAL = 1024  # candidates that hold the survivors of most distributions
SCALE = 2.0**40


@dataclass(slots=True)
class Limits:
    """Of S rows. top_k 0, top_p 1 and min_p 0 limit nothing."""

    top_k: np.ndarray  # int64
    top_p: np.ndarray  # float64
    min_p: np.ndarray  # float64

    def __getitem__(self, at: np.ndarray) -> Limits:
        return Limits(self.top_k[at], self.top_p[at], self.min_p[at])

    def candidates(self, vocab: int) -> int:
        """How many of the likeliest tokens to look at first."""
        most = int(self.top_k.max()) + SPARE
        if not self.top_k.all():
            most = max(most, USUAL)
        return most if most < vocab // 2 else vocab


def _weights(values: Tensor, top_S1: Tensor, floor_S1: Tensor) -> Tensor:
    """Integer weights of logits; 0 below the floor."""
    weights = values.sub(top_S1).exp_().mul_(SCALE).to(torch.int64)
    return weights.masked_fill_(values < floor_S1, 0)


def _of(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)[:, None]


def threshold(scaled_SV: Tensor, values_SK: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """(threshold_S1, complete_S): the lowest logit that survives, and whether all survivors are candidates.

    `values_SK` are each row's K largest logits, best first. Where a row is not complete, its threshold
    is not right: ask again with K = V.
    """
    count, most = values_SK.shape
    top_S1 = values_SK[:, :1]
    floor_S1 = torch.full_like(top_S1, -torch.inf)
    if limits.min_p.any():
        floor_S1 = (top_S1 + _of(np.log(np.maximum(limits.min_p, 1e-300)), values_SK)).to(
            values_SK.dtype
        )
        floor_S1 = torch.minimum(floor_S1, top_S1)
    ranked = limits.top_k > 0
    if ranked.any():
        last = _of(np.minimum(np.where(ranked, limits.top_k, 1), most) - 1, values_SK)
        kth_S1 = values_SK.gather(1, last).masked_fill_(~_of(ranked, values_SK), -torch.inf)
        floor_S1 = torch.maximum(floor_S1, kth_S1)
    reached_S1 = torch.ones_like(top_S1, dtype=torch.bool)
    if (limits.top_p < 1).any():
        weights_SK = _weights(values_SK, top_S1, floor_S1)
        sums_SK = weights_SK.cumsum(dim=1)
        total_S1 = sums_SK[:, -1:]
        if most < scaled_SV.shape[1] and not ranked.all():  # a row without top-k has mass outside
            total_S1 = _weights(scaled_SV, top_S1, floor_S1).sum(dim=1, keepdim=True)
        wanted_S1 = (total_S1.double() * _of(limits.top_p, values_SK)).ceil_().to(torch.int64)
        at_S1 = (sums_SK < wanted_S1).sum(dim=1, keepdim=True)
        cut_S1 = values_SK.gather(1, at_S1.clamp(max=most - 1))
        limited_S1 = _of(limits.top_p < 1, values_SK)
        floor_S1 = torch.maximum(floor_S1, cut_S1.masked_fill_(~limited_S1, -torch.inf))
        reached_S1 = (at_S1 < most) | ~limited_S1
    if most == scaled_SV.shape[1]:
        return floor_S1, torch.ones(count, dtype=torch.bool, device=values_SK.device)
    return floor_S1, (reached_S1 & (values_SK[:, -1:] < floor_S1))[:, 0]


def full_threshold(scaled_SV: Tensor, limits: Limits) -> Tensor:
    """threshold_S1 from a sort of whole rows."""
    values_SV = scaled_SV.sort(dim=-1, descending=True).values
    return threshold(scaled_SV, values_SV, limits)[0]


def draw_limited(scaled_SV: Tensor, limits: Limits, keys_2S: Tensor) -> Tensor:
    """Token ids, int64 [S], of rows with limits: the noise is made for candidates only."""
    vocab = scaled_SV.shape[1]
    # Asking a device whether the candidates were enough would stop the host, so there we sort.
    most = limits.candidates(vocab) if scaled_SV.device.type == "cpu" else vocab
    if most < vocab:
        values_SK, ids_SK = scaled_SV.topk(most, dim=-1)
    else:
        values_SK, ids_SK = scaled_SV.sort(dim=-1, descending=True)
    floor_S1, complete_S = threshold(scaled_SV, values_SK, limits)
    tokens_S = draw_among(values_SK.masked_fill(values_SK < floor_S1, -torch.inf), ids_SK, keys_2S)
    if most < vocab and not bool(complete_S.all()):
        rest = (~complete_S).nonzero()[:, 0]
        at = rest.numpy()
        values_SK, ids_SK = scaled_SV[rest].sort(dim=-1, descending=True)
        floor_S1, _ = threshold(scaled_SV[rest], values_SK, limits[at])
        values_SK = values_SK.masked_fill(values_SK < floor_S1, -torch.inf)
        tokens_S[rest] = draw_among(values_SK, ids_SK, keys_2S[:, rest])
    return tokens_S
