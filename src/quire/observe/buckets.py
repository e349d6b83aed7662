"""Histogram buckets by family, under the names that dashboards were made for. Seconds, tokens or counts."""

from __future__ import annotations

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


def buckets(family: str, max_model_len: int) -> tuple[float, ...]:
    if family == "request_tokens":
        return tokens_up_to(max_model_len)
    return FAMILIES[family]
