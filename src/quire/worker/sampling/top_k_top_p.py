"""Top-k, top-p and min-p: one cutoff per row says which tokens survive.

Knows scaled logits and three numbers of `ROW_PARAMS` per row. Does not know seeds or requests. Tokens are ordered by (logit descending,
id ascending). In this order:

    min-p    keeps the tokens at least min_p times as likely as the likeliest
    top-k    of these, keeps the first k
    top-p    of these, keeps the fewest first tokens whose share (among them) reaches p

Together they keep a prefix of the order, so two numbers describe it: the logit and the id of its last token. Shares
are sums of integers (weight = floor(2^40 * exp(logit - max))), so they depend neither on the order of summation nor
on the number of rows in the batch.

Shape suffixes: S rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.worker.sampling.gumbel import MAX_AT_ONCE, draw, draw_among

SPARE = 64  # candidates beyond top-k, for tokens that tie with the last one
USUAL = 1024  # candidates that include all survivors of most distributions
SCALE = 2.0**40


def _num_candidates(top_k_S: np.ndarray, vocab: int) -> int:
    """How many of the likeliest tokens to try first."""
    most = int(top_k_S.max()) + SPARE
    if not top_k_S.all():
        most = max(most, min(USUAL, vocab // 16))
    return most if most < vocab // 2 else vocab


def _weights(values: Tensor, top_S1: Tensor, floor_S1: Tensor) -> Tensor:
    """Integer weights of logits; 0 below the floor."""
    weights = values.sub(top_S1).exp_().mul_(SCALE).to(torch.int64)
    return weights.masked_fill_(values < floor_S1, 0)


def _of(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)[:, None]


@dataclass(slots=True)
class Cutoff:
    """The last token that survives in each of S rows."""

    logits_S: Tensor  # float32
    ids_S: Tensor  # int64

    def masked_(self, scaled_SV: Tensor) -> Tensor:
        """Set the logits of tokens that do not survive to -inf, in place."""
        logits_S1, ids_S1 = self.logits_S[:, None], self.ids_S[:, None]
        ids_V = torch.arange(scaled_SV.shape[1], device=scaled_SV.device)
        lost_SV = (scaled_SV < logits_S1) | ((scaled_SV == logits_S1) & (ids_V > ids_S1))
        return scaled_SV.masked_fill_(lost_SV, -torch.inf)


def ordered(scaled_SV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(values_SK, ids_SK) of the first `most` tokens of each row, in order.

    Of tokens that tie at the last value, any may be among them, except with `most` = V, which gives all tokens.
    """
    if most == scaled_SV.shape[1]:
        return scaled_SV.sort(dim=-1, descending=True, stable=True)
    values_SK, ids_SK = scaled_SV.topk(most, dim=-1)
    if bool((values_SK[:, 1:] == values_SK[:, :-1]).any()):
        ids_SK = ids_SK.sort(dim=-1).values
        values_SK, at_SK = scaled_SV.gather(1, ids_SK).sort(dim=-1, descending=True, stable=True)
        ids_SK = ids_SK.gather(1, at_SK)
    return values_SK, ids_SK


def surviving(scaled_SV: Tensor, values_SK: Tensor, params_S: np.ndarray) -> tuple[Tensor, Tensor]:
    """(count_S1, complete_S): how many of the first K tokens survive, and whether no token beyond them does.

    The count of a row that is not complete is wrong: call again with K = V.
    """
    count, most = values_SK.shape
    top_k_S, top_p_S, log_min_p_S = (params_S[name] for name in ("top_k", "top_p", "log_min_p"))
    all_here = most == scaled_SV.shape[1]
    top_S1 = values_SK[:, :1]
    floor_S1 = torch.full_like(top_S1, -torch.inf)
    if (log_min_p_S > -np.inf).any():
        floor_S1 = (top_S1 + _of(log_min_p_S, values_SK)).to(values_SK.dtype)
        floor_S1 = torch.minimum(floor_S1, top_S1)
    count_S1 = (values_SK >= floor_S1).sum(dim=1, keepdim=True)
    ranked = top_k_S > 0
    if ranked.any():
        count_S1 = torch.minimum(count_S1, _of(np.where(ranked, top_k_S, most), values_SK))
    if (top_p_S < 1).any():
        place_K = torch.arange(most, device=values_SK.device)
        weights_SK = _weights(values_SK, top_S1, floor_S1).masked_fill_(place_K >= count_S1, 0)
        sums_SK = weights_SK.cumsum(dim=1)
        total_S1 = sums_SK[:, -1:]
        if not all_here and not ranked.all():  # without top-k, other tokens have a share too
            whole_S1 = _weights(scaled_SV, top_S1, floor_S1).sum(dim=1, keepdim=True)
            total_S1 = torch.where(_of(ranked, values_SK), total_S1, whole_S1)
        wanted_S1 = (total_S1.double() * _of(top_p_S, values_SK)).ceil_().to(torch.int64)
        enough_S1 = (sums_SK < wanted_S1).sum(dim=1, keepdim=True) + 1
        enough_S1 = enough_S1.masked_fill_(_of(top_p_S >= 1, values_SK), most)
        count_S1 = torch.minimum(count_S1, enough_S1)
    count_S1 = count_S1.clamp_(min=1, max=most)  # also for rows of NaN
    if all_here:
        return count_S1, torch.ones(count, dtype=torch.bool, device=values_SK.device)
    # Tokens that tie with the last candidate may not be candidates.
    return count_S1, (values_SK.gather(1, count_S1 - 1) > values_SK[:, -1:])[:, 0]


def cutoff(scaled_SV: Tensor, params_S: np.ndarray) -> Cutoff:
    """The cutoffs of rows, computed over the whole vocabulary."""
    values_SV, ids_SV = ordered(scaled_SV, scaled_SV.shape[1])
    last_S1 = surviving(scaled_SV, values_SV, params_S)[0] - 1
    return Cutoff(values_SV.gather(1, last_S1)[:, 0], ids_SV.gather(1, last_S1)[:, 0])


def draw_top_k_top_p(scaled_SV: Tensor, params_S: np.ndarray, keys_2S: Tensor) -> Tensor:
    """Draw token ids, int64 [S], for rows with limits. Computes noise for the candidates only, if they suffice."""
    vocab = scaled_SV.shape[1]
    # On a device, checking whether the candidates suffice would make the host wait, so sort there.
    most = _num_candidates(params_S["top_k"], vocab) if scaled_SV.device.type == "cpu" else vocab
    values_SK, ids_SK = ordered(scaled_SV, most)
    count_S1, complete_S = surviving(scaled_SV, values_SK, params_S)
    place_K = torch.arange(most, device=scaled_SV.device)
    kept_SK = values_SK.masked_fill(place_K >= count_S1, -torch.inf)
    tokens_S = draw_among(kept_SK, ids_SK, keys_2S)
    if most < vocab and not bool(complete_S.all()):
        for indices in (~complete_S).nonzero()[:, 0].split(max(1, MAX_AT_ONCE // vocab)):
            part_SV = scaled_SV[indices]
            cut = cutoff(part_SV, params_S[indices.numpy()])
            tokens_S[indices] = draw(cut.masked_(part_SV), keys_2S[:, indices])
    return tokens_S
