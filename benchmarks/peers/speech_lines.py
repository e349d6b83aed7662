"""The sound of `python -m benchmarks speech`, for engines that speak the protocol of lines.py: a prompt is the number of a window.

NumPy and the standard library only: every engine runs in its own environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lines
import numpy as np

RATE, WINDOW_S, DIFFERENT = 16_000, 30, 20
Transcribe = Callable[[list[Any], int], Sequence[Sequence[int]]]
"""(windows of samples, tokens of each) -> tokens of each"""


def windows() -> list[Any]:
    """Noise, float32: no engine has less to do because of silence."""
    draw = np.random.default_rng(0)
    return [
        0.1 * draw.standard_normal(RATE * WINDOW_S).astype(np.float32) for _ in range(DIFFERENT)
    ]


def asked() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def serve(answers: Any, about: dict[str, Any], transcribe: Transcribe) -> None:
    """Answer requests until stdin ends. Samples exist before the clock starts."""
    sound = windows()

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        some = [sound[prompt[0] % DIFFERENT] for prompt in prompts]
        return [[int(token) for token in one] for one in transcribe(some, output)]

    lines.serve(answers, about, generate)
