"""Rotary positions: the angle of each pair of features at each position, for every known recipe.

Knows config.json's rotary parameters in their one spelling (`models/hf_config.py`). Does not know queries or keys:
`ops.rotate` turns them. Angles are worked out once a step: it is a product and two functions. On a CPU those of the
first positions are looked up, because four operations of torch cost a small step more than they compute.

Recipes, by `rope_type`: default, linear, dynamic, yarn, longrope, llama3, proportional; each may turn only a part
of the features (`partial_rotary_factor`).

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), "dynamic NTK" and "linear" as in
Transformers, llama3 as in Meta's llama-models.

Shape suffixes: T tokens, P pairs of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError

Angles = tuple[Tensor, Tensor]
"""cos_TP and sin_TP, float32."""

Parameters = Mapping[str, Any]

KEPT = 8192  # 4 MB of 64 pairs


class Rotary(nn.Module):
    """Angles of positions.

    Args:
        head_dim: features of a head.
        parameters: rope_type, rope_theta and what the type needs.
        max_length: the longest request. LongRoPE has two sets of factors, and which of them holds must not
            change while a request runs, so the set for long texts is taken when any request could be long.
    """

    frequencies_P: Tensor
    kept: Angles | None = None  # of the first positions, on the host

    def __init__(self, head_dim: int, parameters: Parameters, max_length: int = 0):
        super().__init__()
        self.kind = str(parameters["rope_type"])
        if self.kind not in RECIPES:
            raise ConfigError(f"rope_type {self.kind!r} is unknown; there are {', '.join(RECIPES)}")
        self.options = dict(parameters)
        whole = head_dim if self.kind == "proportional" else partial(head_dim, parameters)
        self.size = whole
        with torch.device("cpu"):  # the model may be under construction on "meta"
            frequencies_P, self.factor = RECIPES[self.kind](whole, parameters, max_length)
        self.register_buffer("frequencies_P", frequencies_P.float(), persistent=False)

    def forward(self, positions_T: Tensor) -> Angles:
        """cos_TP and sin_TP, times the recipe's attention factor."""
        if positions_T.device.type == "cpu":
            places_T = positions_T.numpy()
            with suppress(IndexError):  # one of them is further on
                cos_TP, sin_TP = (torch.from_numpy(part.numpy()[places_T]) for part in self.table())
                return cos_TP, sin_TP
        return self.angles(positions_T)

    def table(self) -> Angles:
        """Angles of the first positions, on the host: [KEPT, P]."""
        if self.kept is None:
            cos_LP, sin_LP = self.angles(torch.arange(KEPT))
            self.kept = cos_LP.contiguous(), sin_LP.contiguous()
        return self.kept

    def angles(self, positions_T: Tensor) -> Angles:
        """As `forward`, worked out."""
        if self.kind == "dynamic":
            angles_TP = positions_T[:, None] * self._dynamic(positions_T)
        else:
            angles_TP = positions_T[:, None] * self.frequencies_P
        if self.factor == 1.0:
            return angles_TP.cos(), angles_TP.sin()
        return angles_TP.cos() * self.factor, angles_TP.sin() * self.factor

    def _dynamic(self, positions_T: Tensor) -> Tensor:
        """Frequencies by position: the base grows with the length of the text up to the token itself.

        (So a token's angle depends on nothing but its position. Transformers takes the longest text of the
        batch at hand, which is the same while a single text is generated token by token.)
        """
        trained = self.options["max_position_embeddings"]
        growth_T1 = (positions_T[:, None] + 1).clamp(min=trained).double() / trained
        factor = self.options["factor"]
        growth_T1 = factor * growth_T1 - (factor - 1)
        exponents_P = torch.arange(0, self.size, 2, device=positions_T.device).double() / self.size
        bases_T1 = self.options["rope_theta"] * growth_T1 ** (self.size / (self.size - 2))
        return (bases_T1**-exponents_P).float()


def partial(head_dim: int, parameters: Parameters) -> int:
    """How many features turn."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def plain(size: int, theta: float) -> Tensor:
    """theta ** (-2 i / size), i = 0 .. size / 2."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _default(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    return plain(size, p["rope_theta"]), 1.0


def _linear(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Positions closer together by `factor`."""
    return plain(size, p["rope_theta"]) / _needed(p, "factor"), 1.0


def _dynamic(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    _needed(p, "factor"), _needed(p, "max_position_embeddings")
    return plain(size, p["rope_theta"]), 1.0


def _llama3(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Slow pairs are slowed by `factor`, fast ones kept, those between blended by how often they turn."""
    frequencies_P = plain(size, p["rope_theta"])
    trained = _needed(p, "original_max_position_embeddings")
    low, high = _needed(p, "low_freq_factor"), _needed(p, "high_freq_factor")
    turns_P = trained * frequencies_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return frequencies_P * (kept_P + (1 - kept_P) / _needed(p, "factor")), 1.0


def _yarn(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """As llama3, blended by the pair's number; and attention is sharpened by a factor of the angles."""
    theta, trained = p["rope_theta"], _needed(p, "original_max_position_embeddings")
    factor = p.get("factor") or p["max_position_embeddings"] / trained

    def pair_that_turns(times: float) -> float:
        """Number of the pair (not whole) that makes so many turns over the trained length."""
        return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(p.get("beta_fast") or 32)
    last = pair_that_turns(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    pairs_P = torch.arange(size // 2, dtype=torch.float32)
    slowed_P = ((pairs_P - first) / (last - first)).clamp(0, 1)
    frequencies_P = plain(size, theta)
    sharp = p.get("attention_factor")
    if sharp is None:
        one, all_dims = p.get("mscale"), p.get("mscale_all_dim")
        sharp = (
            _sharpness(factor, one) / _sharpness(factor, all_dims)
            if one and all_dims
            else _sharpness(factor, 1.0)
        )
    return frequencies_P * (1 - slowed_P + slowed_P / factor), float(sharp)


def _sharpness(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Each pair slowed by a factor of its own, found by search; one set for short texts, one for long."""
    trained = _needed(p, "original_max_position_embeddings")
    factor = p.get("factor") or p["max_position_embeddings"] / trained
    which = "long_factor" if max_length > trained else "short_factor"
    factors_P = torch.tensor(_needed(p, which), dtype=torch.float32)
    if factors_P.shape != (size // 2,):
        raise ConfigError(f"rope: {which} has {len(factors_P)} factors for {size // 2} pairs")
    sharp = p.get("attention_factor")
    if sharp is None:
        sharp = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return plain(size, p["rope_theta"]) / factors_P, float(sharp)


def _proportional(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Frequencies as if all pairs turned, but those after the first part stand still (Gemma 4)."""
    frequencies_P = plain(size, p["rope_theta"]) / (p.get("factor") or 1.0)
    turning = int(p.get("partial_rotary_factor", 1.0) * size // 2)
    frequencies_P[turning:] = 0
    return frequencies_P, 1.0


RECIPES: dict[str, Callable[[int, Parameters, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def _needed(p: Parameters, key: str) -> Any:
    if p.get(key) is None:
        raise ConfigError(
            f"config.json's rope parameters lack {key!r}, which {p['rope_type']} needs"
        )
    return p[key]
