"""Attention of packed prompts to themselves, without a cache: each token attends to earlier and later tokens of its prompt.

Shape suffixes: T tokens, B1 prompts + 1, H query heads, K key/value heads, D head size, L distances (2 n - 1 of n
positions), N tokens of one prompt.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.dispatch import op

QUERIES = 1024
"""Queries of a prompt that a mask has at once."""


@op
def packed_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    starts_B1: Tensor,
    scale: float,
    window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:
    """o_THD. Prompt b has the tokens starts_B1[b] : starts_B1[b + 1]; prompts are computed one by one, so its bits do not
    depend on others.

    window: a token attends to itself, and to window - 1 tokens before it and after it. bias_HL: float32, added to the
    scaled score of query i and key j: the one at j - i + (L - 1) / 2.
    """
    o_THD = torch.empty_like(q_THD)
    grouped = q_THD.shape[1] != k_TKD.shape[1]
    for start, stop in itertools.pairwise(starts_B1.tolist()):
        q_HND, k_KND, v_KND = (x[start:stop].transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
        size = stop - start
        step = size if window is None and bias_HL is None else QUERIES
        for first in range(0, size, step):
            some = slice(first, min(size, first + step))
            mask = None
            if window is not None or bias_HL is not None:
                mask = _mask(some, size, window, bias_HL, q_THD)
            o_HND = F.scaled_dot_product_attention(
                q_HND[None, :, some],
                k_KND[None],
                v_KND[None],
                mask,
                scale=scale,
                enable_gqa=grouped,
            )[0]
            o_THD[start + some.start : start + some.stop] = o_HND.transpose(0, 1)
    return o_THD


def _mask(
    some: slice, size: int, window: int | None, bias_HL: Tensor | None, like: Tensor
) -> Tensor:
    """What is added to the scores of some queries, [H or 1, queries, N]."""
    queries = torch.arange(some.start, some.stop, device=like.device)
    distances_NN = torch.arange(size, device=like.device) - queries[:, None]
    mask = like.new_zeros(1, *distances_NN.shape)
    if bias_HL is not None:
        mask = bias_HL[:, distances_NN + bias_HL.shape[1] // 2].to(like.dtype)
    if window is not None:
        mask = mask.masked_fill(distances_NN.abs() >= window, -torch.inf)
    return mask
