"""Histogram buckets by family, with the bounds that dashboards for vLLM expect. Seconds, tokens or counts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from quire.errors import ConfigError

FAMILIES: dict[str, tuple[float, ...]] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
        160, 640, 2560,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "kv_transfer_size": (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6),
    "kv_lookup": (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1),
    "kv_lookup_wait": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10),
    "kv_cache_residency": (
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
    ),
}  # fmt: skip


def tokens_up_to(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    found: list[float] = []
    decade = 1
    while True:
        for digit in (1, 2, 5):
            if digit * decade > most:
                return tuple(found) or (1.0,)
            found.append(float(digit * decade))
        decade *= 10


LENGTHS = "request_tokens"  # the family whose bounds depend on max_model_len


def checked(custom: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Validate the user's buckets, by family.

    Raises:
        ConfigError: an unknown family, or not a list of increasing numbers.
    """
    known = (*FAMILIES, LENGTHS)
    for family, bounds in custom.items():
        if family not in known:
            raise ConfigError(
                f"custom_histogram_buckets: unknown family {family!r}; choose from {', '.join(known)}"
            )
        numbers = isinstance(bounds, list | tuple) and all(
            isinstance(one, int | float) and not isinstance(one, bool) for one in bounds
        )
        if not numbers or not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ConfigError(
                f"custom_histogram_buckets: {family} must be a list of increasing numbers"
            )
    return {family: tuple(map(float, bounds)) for family, bounds in custom.items()}


def buckets(
    family: str, max_model_len: int, custom: Mapping[str, tuple[float, ...]] | None = None
) -> tuple[float, ...]:
    if custom and family in custom:
        return custom[family]
    if family == LENGTHS:
        return tokens_up_to(max_model_len)
    return FAMILIES[family]
