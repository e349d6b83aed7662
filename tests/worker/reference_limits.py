"""The tokens that survive min-p, top-k and top-p: the one definition that every sampler is tested against."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from quire.worker.sampling.row_params import ROW_PARAMS
from quire.worker.sampling.top_k_top_p import SCALE


def limits_of(
    top_k: ArrayLike, top_p: ArrayLike, min_p: ArrayLike, temperature: ArrayLike = 1.0, seed: ArrayLike = 0
) -> np.ndarray:  # fmt: skip
    """Entries of the table of rows, [S]."""
    params_S = np.empty(len(np.atleast_1d(top_k)), ROW_PARAMS)
    with np.errstate(divide="ignore"):
        columns = temperature, seed, top_k, top_p, np.log(np.asarray(min_p, np.float64))
    for name, column in zip(ROW_PARAMS.names or (), columns, strict=True):
        params_S[name] = column
    return params_S


def survivors(values: np.ndarray, top_k: int, top_p: float, log_min_p: float) -> np.ndarray:
    """bool [V]: a prefix of the tokens in the order (logit descending, id ascending).

    Tokens of equal logits pass min-p together. Top-k keeps exactly k of the tokens that pass (or all, if they are fewer);
    top-p keeps the smallest prefix of those whose share reaches p, and never less than one token. Weights are integers, so
    their sums are exact; the one product, total * p, is in float64.
    """
    top = values.max()
    order = np.argsort(-values, kind="stable")
    floor = np.float32(top + log_min_p)
    order = order[values[order] >= min(floor, top)]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        exps = torch.exp(torch.from_numpy(values) - float(top))
        sums = exps.mul_(SCALE).to(torch.int64).numpy()[order].cumsum()
        wanted = np.ceil(np.float64(sums[-1]) * top_p)
        order = order[: 1 + int((sums < wanted).sum())]
    alive = np.zeros(len(values), bool)
    alive[order] = True
    return alive


def all_survivors(scaled_SV: torch.Tensor, params_S: np.ndarray) -> torch.Tensor:
    """bool [S, V]."""
    limits = (params_S[name] for name in ("top_k", "top_p", "log_min_p"))
    rows = zip(scaled_SV.numpy(), *limits, strict=True)
    found = [survivors(values, int(k), float(p), float(m)) for values, k, p, m in rows]
    return torch.from_numpy(np.stack(found))


def tied_logits(count: int, vocab: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Logits of a few distinct bf16 values, some -inf, some zeros of either sign; and limits of every kind."""
    dice, made = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    spread = [0.0, 0.02, 0.4, 1.5, 6.0][seed % 5]
    scaled_SV = (torch.randn(count, vocab, generator=made) * spread * 2).round() / 2
    scaled_SV = (scaled_SV + [0.0, 7.03125][seed % 2]).bfloat16().float()
    scaled_SV = torch.where(torch.rand(count, vocab, generator=made) < 0.2, 0.0, scaled_SV)
    scaled_SV = torch.where(torch.rand(count, vocab, generator=made) < 0.1, -0.0, scaled_SV)
    if seed % 3 == 0:
        scaled_SV[:, 1 if vocab > 1 else vocab :: 3] = -torch.inf
    limits = limits_of(
        dice.choice([0, 1, 1, 2, 7, 40, 300, 2500], count),
        dice.choice([1.0, 0.9, 0.5, 0.999, 1e-6, 0.0], count),
        dice.choice([0, 0, 0.05, 0.6, 1.0], count),
    )
    return scaled_SV, limits
