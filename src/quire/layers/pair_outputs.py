"""The outputs of pairs of a token and an expert: what this rank computes, and what all ranks gather.

Knows seats, the places of experts' weights, and the exchange of ranks. Does not know which rank has which expert.

Shape suffixes: D features, P pairs, N pairs of this rank, R ranks, M most pairs of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.experts import ExpertWeights, expert_products
from quire.parallel.ranks import RankGroup


def outputs_of_seats(x_ND: Tensor, seat_N: Tensor, expert_weights: ExpertWeights) -> Tensor:
    """y_ND: of each row, the output of the expert in its seat."""
    if not len(seat_N):
        return torch.zeros_like(x_ND)
    return expert_products(
        expert_products(x_ND, seat_N, expert_weights, False), seat_N, expert_weights, True
    )


def gathered_pairs(y_ND: Tensor, rank_P: Tensor, ranks: RankGroup) -> Tensor:
    """y_PD: the outputs of all pairs, from those that each rank has computed; `rank_P` says which."""
    most = int(rank_P.bincount(minlength=ranks.size).max())
    y_MD = y_ND.new_zeros(most, y_ND.shape[1])
    y_MD[: len(y_ND)] = y_ND
    y_MRD = ranks.gather(y_MD).view(most, ranks.size, -1)
    place_P = torch.empty_like(rank_P)
    for rank in range(ranks.size):
        (pairs,) = (rank_P == rank).nonzero(as_tuple=True)
        place_P[pairs] = torch.arange(len(pairs))
    return y_MRD[place_P, rank_P]
