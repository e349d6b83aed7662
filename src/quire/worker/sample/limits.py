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

from quire.worker.sample.draw import MOST_AT_ONCE, draw, draw_among

SPARE = 64  # candidates beyond top-k, for tokens that tie with the last one
USUAL = 1024  # candidates that hold the survivors of most distributions
SCALE = 2.0**40
NUM_BUCKETS, DEPTH = 4096, 28.0  # exp(-28) * SCALE < 1


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
            most = max(most, min(USUAL, vocab // 16))
        return most if most < vocab // 2 else vocab


def _weights(values: Tensor, top_S1: Tensor, floor_S1: Tensor) -> Tensor:
    """Integer weights of logits; 0 below the floor."""
    weights = values.sub(top_S1).exp_().mul_(SCALE).to(torch.int64)
    return weights.masked_fill_(values < floor_S1, 0)


def _of(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)[:, None]


def threshold(scaled_SV: Tensor, values_SK: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """(threshold_S1, complete_S): the lowest logit that survives, and whether all survivors are candidates.

    `values_SK` are each row's K largest logits, best first. Where a row is not complete, its threshold
    is not right: ask again with K = V.
    """
    count, most = values_SK.shape
    top_S1 = values_SK[:, :1]
    floor_S1 = torch.full_like(top_S1, -torch.inf)
    if limits.min_p.any():
        some_S = limits.min_p > 0
        below_S = np.log(limits.min_p, where=some_S, out=np.full(count, -np.inf))
        floor_S1 = (top_S1 + _of(below_S, values_SK)).to(values_SK.dtype)
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
    """threshold_S1 of whole rows, however many survive."""
    vocab = scaled_SV.shape[1]
    if (
        scaled_SV.device.type != "cpu"
    ):  # what follows asks the device for sizes, which stops the host
        return threshold(scaled_SV, scaled_SV.sort(dim=-1, descending=True).values, limits)[0]
    most = int(limits.top_k.max())
    if most > vocab // 8:
        return threshold(scaled_SV, scaled_SV.sort(dim=-1, descending=True).values, limits)[0]
    values_SK = (
        scaled_SV.topk(most, dim=-1).values if most > 1 else scaled_SV.amax(dim=-1, keepdim=True)
    )
    above = Limits(limits.top_k, np.ones_like(limits.top_p), limits.min_p)
    floor_S1, _ = threshold(scaled_SV, values_SK, above)
    if (limits.top_p < 1).any():
        cut_S1 = _cut(scaled_SV, values_SK[:, :1], floor_S1, limits.top_p)
        floor_S1 = torch.maximum(floor_S1, cut_S1)
    return floor_S1


def _cut(scaled_SV: Tensor, top_S1: Tensor, floor_S1: Tensor, top_p: np.ndarray) -> Tensor:
    """Top-p's threshold_S1 without a sort: find the bucket of logits in which p is reached, sort that."""
    weights_SV = _weights(scaled_SV, top_S1, floor_S1)
    # Logits as far below the top as DEPTH have no weight. A higher logit is never in a later bucket.
    bucket_SV = scaled_SV.sub(top_S1).mul_(-NUM_BUCKETS / DEPTH).clamp_(max=NUM_BUCKETS - 1.0)
    bucket_SV = bucket_SV.to(torch.int64).clamp_(min=0)  # NaN may be anything as an integer
    counts = torch.zeros((len(scaled_SV), NUM_BUCKETS), dtype=torch.int64)
    sums = counts.scatter_add(1, bucket_SV, weights_SV).cumsum(dim=1)
    wanted_S1 = (sums[:, -1:].double() * _of(top_p, scaled_SV)).ceil_().to(torch.int64)
    here_S1 = (sums < wanted_S1).sum(dim=1, keepdim=True).clamp(max=NUM_BUCKETS - 1)
    before_S1 = torch.where(here_S1 > 0, sums.gather(1, (here_S1 - 1).clamp(min=0)), 0)
    inside_SV = bucket_SV == here_S1
    most = max(1, int(inside_SV.sum(dim=1).max()))
    values_SK = scaled_SV.masked_fill(~inside_SV, -torch.inf).topk(most, dim=-1).values
    sums_SK = _weights(values_SK, top_S1, floor_S1).cumsum_(dim=1) + before_S1
    at_S1 = (sums_SK < wanted_S1).sum(dim=1, keepdim=True).clamp(max=most - 1)
    return values_SK.gather(1, at_S1).masked_fill_(_of(top_p >= 1, scaled_SV), -torch.inf)


def draw_limited(scaled_SV: Tensor, limits: Limits, keys_2S: Tensor) -> Tensor:
    """Token ids, int64 [S], of rows with limits: the noise is made for candidates only, if they suffice."""
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
        for at in (~complete_S).nonzero()[:, 0].split(max(1, MOST_AT_ONCE // vocab)):
            part_SV = scaled_SV[at]
            floor_S1 = full_threshold(part_SV, limits[at.numpy()])
            part_SV.masked_fill_(part_SV < floor_S1, -torch.inf)
            tokens_S[at] = draw(part_SV, keys_2S[:, at])
    return tokens_S
