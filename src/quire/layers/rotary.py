"""Rotary position embedding: the angle of each pair of features at each position, for every `rope_type`.

Knows config.json's rotary parameters as `models/hf_config.py` normalizes them. Does not know queries or keys:
`rotate` (`ops/reference.py`) rotates them. Angles are computed once a step. On a CPU, the angles of the first positions
come from a table, because in a small step the overhead of four torch operations exceeds their arithmetic.

A position is one number, or P of them (M-RoPE: time, height, width), of which `mrope_section` gives each pair one.

Values of `rope_type`: default, linear, dynamic, yarn, longrope, llama3, proportional; each may rotate only a part of
the features (`partial_rotary_factor`). For the rows and columns of patches of a picture: axial, and axial_alternating.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), "dynamic NTK" and "linear" as in
Transformers, llama3 as in Meta's llama-models, M-RoPE (Qwen2-VL, 2409.12191).

Shape suffixes: T tokens, P pairs of features, C components of a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError

Angles = tuple[Tensor, Tensor]
"""cos_TP and sin_TP, float32."""

Parameters = Mapping[str, Any]

TABLE_LENGTH = 8192  # positions in the table; 4 MB with 64 pairs


class Rotary(nn.Module):
    """Angles of positions.

    Args:
        head_dim: features of a head.
        parameters: rope_type, rope_theta and the parameters of the type.
        max_length: length limit of a request. LongRoPE has two sets of factors, and a request must not change
            from one to the other while it runs, so the long set is used if any request may be long.
    """

    frequencies_P: Tensor
    component_P: Tensor | None  # see `components`
    _table: Angles | None = None  # angles of the first positions, on the host

    def __init__(self, head_dim: int, parameters: Parameters, max_length: int = 0):
        super().__init__()
        self.kind = str(parameters["rope_type"])
        if self.kind not in ROPE_INIT_FUNCTIONS:
            raise ConfigError(
                f"rope_type {self.kind!r} is unknown; choose from {', '.join(ROPE_INIT_FUNCTIONS)}"
            )
        self.options = dict(parameters)
        whole = head_dim if self.kind == "proportional" else rotary_dim(head_dim, parameters)
        self.size = whole
        with torch.device("cpu"):  # the model may be under construction on "meta"
            frequencies_P, self.attention_factor = ROPE_INIT_FUNCTIONS[self.kind](
                whole, parameters, max_length
            )
            component_P = components(parameters, len(frequencies_P))
        self.register_buffer("frequencies_P", frequencies_P.float(), persistent=False)
        self.register_buffer("component_P", component_P, persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        """cos_TP and sin_TP, times the recipe's attention factor; positions: [T] or [T, C]."""
        if positions.device.type == "cpu" and positions.ndim == 1:
            places_T = positions.numpy()
            with suppress(IndexError):  # a position is beyond the table
                cos_TP, sin_TP = (torch.from_numpy(part.numpy()[places_T]) for part in self.table())
                return cos_TP, sin_TP
        return self.angles(positions)

    def table(self) -> Angles:
        """Angles of the first positions, on the host: [TABLE_LENGTH, P]."""
        if self._table is None:
            cos_LP, sin_LP = self.angles(torch.arange(TABLE_LENGTH))
            self._table = cos_LP.contiguous(), sin_LP.contiguous()
        return self._table

    def angles(self, positions: Tensor) -> Angles:
        """As `forward`, computed without the table.

        Raises:
            ValueError: positions have several components, and the parameters do not say which pair takes which.
        """
        if positions.ndim == 1:
            positions_TP = positions[:, None]
        elif self.component_P is not None:
            positions_TP = positions[:, self.component_P]
        else:
            raise ValueError("positions of several components need `mrope_section` in config.json")
        frequencies = self._dynamic(positions_TP) if self.kind == "dynamic" else self.frequencies_P
        angles_TP = positions_TP * frequencies
        if self.attention_factor == 1.0:
            return angles_TP.cos(), angles_TP.sin()
        return angles_TP.cos() * self.attention_factor, angles_TP.sin() * self.attention_factor

    def _dynamic(self, positions_TP: Tensor) -> Tensor:
        """Frequencies by position: the base grows with the length of the text up to the token itself.

        A token's angle thus depends only on its position. Transformers uses the longest text of the batch, which
        gives the same angles while one text is generated token by token.
        """
        trained = self.options["max_position_embeddings"]
        growth_TP = (positions_TP + 1).clamp(min=trained).double() / trained
        factor = self.options["factor"]
        growth_TP = factor * growth_TP - (factor - 1)
        exponents_P = torch.arange(0, self.size, 2, device=positions_TP.device).double() / self.size
        bases_TP = self.options["rope_theta"] * growth_TP ** (self.size / (self.size - 2))
        return (bases_TP**-exponents_P).float()


class LayerRotaries(nn.Module):
    """The rotary embeddings of a decoder's layers. Layers with equal parameters share one.

    Args:
        head_dim: of all layers, or of each; parameters: of each layer, in order; max_length: see `Rotary`.
    """

    def __init__(
        self,
        head_dim: int | Sequence[int],
        parameters: Sequence[Parameters],
        max_length: int = 0,
    ):
        super().__init__()
        sizes = [head_dim] * len(parameters) if isinstance(head_dim, int) else head_dim
        layers = list(zip(sizes, parameters, strict=True))
        distinct = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
        self.kinds = nn.ModuleList(Rotary(*layer, max_length) for layer in distinct)
        self.kind_of_layer = [distinct.index(layer) for layer in layers]

    @property
    def shared(self) -> Rotary | None:
        """The one that all layers share, if they do."""
        only: Any = self.kinds[0] if len(self.kinds) == 1 else None
        return only

    def forward(self, positions: Tensor) -> list[Angles]:
        """By layer, the angles of positions [T] or [T, C]."""
        angles = [rotary(positions) for rotary in self.kinds]
        return [angles[kind] for kind in self.kind_of_layer]


def components(parameters: Parameters, pairs: int) -> Tensor | None:
    """Which component of a position turns each pair: in blocks (Qwen2-VL) or in turns (Qwen3-VL); None: all the same.

    Raises:
        ConfigError: the sections do not cover the pairs.
    """
    sections = parameters.get("mrope_section")
    if parameters["rope_type"].startswith("axial"):
        sections = [pairs // 2] * 2
    if not sections:
        return None
    if sum(sections) != pairs:
        raise ConfigError(f"rope: mrope_section={sections} does not add up to {pairs} pairs")
    if not parameters.get("mrope_interleaved"):
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    component_P = torch.zeros(pairs, dtype=torch.int64)
    for component, length in enumerate(sections[1:], start=1):
        component_P[component : length * len(sections) : len(sections)] = component
    return component_P


def rotary_dim(head_dim: int, parameters: Parameters) -> int:
    """The number of features that are rotated."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def inverse_frequencies(size: int, theta: float) -> Tensor:
    """theta ** (-2 i / size), i = 0 .. size / 2."""
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _default(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    return inverse_frequencies(size, p["rope_theta"]), 1.0


def _linear(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Positions divided by `factor`."""
    return inverse_frequencies(size, p["rope_theta"]) / _required(p, "factor"), 1.0


def _dynamic(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    _required(p, "factor"), _required(p, "max_position_embeddings")
    return inverse_frequencies(size, p["rope_theta"]), 1.0


def _llama3(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Low frequencies are divided by `factor`, high ones kept, those between blended by turns."""
    frequencies_P = inverse_frequencies(size, p["rope_theta"])
    trained = _required(p, "original_max_position_embeddings")
    low, high = _required(p, "low_freq_factor"), _required(p, "high_freq_factor")
    turns_P = trained * frequencies_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return frequencies_P * (kept_P + (1 - kept_P) / _required(p, "factor")), 1.0


def _yarn(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """As llama3, with a blend by pair index; a factor on cos and sin also sharpens attention."""
    theta, trained = p["rope_theta"], _required(p, "original_max_position_embeddings")
    factor = p.get("factor") or p["max_position_embeddings"] / trained

    def pair_that_turns(times: float) -> float:
        """Fractional index of the pair that makes this many turns over the trained length."""
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
    frequencies_P = inverse_frequencies(size, theta)
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        one, all_dims = p.get("mscale"), p.get("mscale_all_dim")
        attention_factor = (
            _attention_scale(factor, one) / _attention_scale(factor, all_dims)
            if one and all_dims
            else _attention_scale(factor, 1.0)
        )
    return frequencies_P * (1 - slowed_P + slowed_P / factor), float(attention_factor)


def _attention_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Each pair's frequency divided by its own factor; one set of factors for short texts, one for long."""
    trained = _required(p, "original_max_position_embeddings")
    factor = p.get("factor") or p["max_position_embeddings"] / trained
    length = "long" if max_length > trained else "short"
    which = f"{length}_factor"
    factors_P = torch.tensor(_required(p, which), dtype=torch.float32)
    if factors_P.shape != (size // 2,):
        raise ConfigError(f"rope: {which} has {len(factors_P)} factors for {size // 2} pairs")
    attention_factor = p.get(f"{length}_mscale", p.get("attention_factor"))  # Phi-3.5-MoE has both
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        )
    return inverse_frequencies(size, p["rope_theta"]) / factors_P, float(attention_factor)


def _proportional(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Frequencies as if all pairs were rotated, but zero after the rotated part (Gemma 4)."""
    frequencies_P = inverse_frequencies(size, p["rope_theta"]) / (p.get("factor") or 1.0)
    turning = int(p.get("partial_rotary_factor", 1.0) * size // 2)
    frequencies_P[turning:] = 0
    return frequencies_P, 1.0


def _axial(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """Rows turn the first half of the pairs, and columns the other, with the same frequencies (Qwen-VL's vision towers)."""
    return inverse_frequencies(size // 2, p["rope_theta"]).repeat(2), 1.0


def _axial_alternating(size: int, p: Parameters, max_length: int) -> tuple[Tensor, float]:
    """The same, but rows take every second frequency, and columns the others (Pixtral's vision tower)."""
    frequencies_P = inverse_frequencies(size, p["rope_theta"])
    return torch.cat((frequencies_P[::2], frequencies_P[1::2])), 1.0


ROPE_INIT_FUNCTIONS: dict[str, Callable[[int, Parameters, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "axial": _axial,
    "axial_alternating": _axial_alternating,
}


def _required(p: Parameters, key: str) -> Any:
    if p.get(key) is None:
        raise ConfigError(
            f"config.json's rope parameters lack {key!r}, which {p['rope_type']} needs"
        )
    return p[key]
