"""The table of numbers by row that a draw reads. The CPU kernels read the same bytes.

Knows each number, its type and the value that means "no limit". Does not know how a draw uses it. The sampler, the
fast path and the bindings pass entries of the table and name no number. A new number is a field of
`CRowParams` (ops/cpu/structs.py) and of `RowParams` (ops/cpu/kernels/sampling.h), its value in `row_params`, and the computation with it:
the definition (`top_k_top_p.py`), sampling.cpp and ops/triton/sampling.py.

Shape suffixes: S rows.
"""

from __future__ import annotations

import math

import numpy as np

from quire.ops.cpu.structs import CRowParams
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.gumbel import seed_word

ROW_PARAMS = np.dtype(CRowParams)
"""temperature (0: greedy), seed (`gumbel.seed_word` of the request's), top_k (0: no limit), top_p (1: no limit), log_min_p
(-inf: no limit)."""
MAX_TOP_K = (1 << 31) - 1  # exceeds any vocabulary: no limit


def row_params(params: SamplingParams) -> tuple[float, int, int, float, float]:
    """A row's entry in the table."""
    return (
        0.0 if params.greedy else params.temperature,
        seed_word(params.seed or 0),
        min(max(params.top_k, 0), MAX_TOP_K),
        params.top_p,
        float(np.log(params.min_p)) if params.min_p > 0 else -math.inf,
    )


def is_greedy(params_S: np.ndarray) -> np.ndarray:
    """bool [S]."""
    found: np.ndarray = params_S["temperature"] == 0
    return found


def is_limited(params_S: np.ndarray) -> np.ndarray:
    """bool [S]: rows that draw from a part of the vocabulary."""
    limits_S = (params_S["top_k"] > 0) | (params_S["top_p"] < 1)
    found: np.ndarray = ~is_greedy(params_S) & (limits_S | (params_S["log_min_p"] > -np.inf))
    return found
