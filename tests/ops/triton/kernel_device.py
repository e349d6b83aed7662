"""Where the kernels of these tests run, and in which formats.

The interpreter rounds bfloat16 and 8-bit floats otherwise than a device does: these wait for one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.device),
]


def interpreter_keeps_rows_apart() -> bool:
    """Whether numpy's matmul, with which the interpreter computes tl.dot, gives a row the same bits at any place."""
    x, w = (torch.randn(16, 512, generator=torch.manual_seed(5)).numpy() for _ in range(2))
    whole, moved = x @ w.T, np.zeros_like(x)
    moved[0] = x[7]
    return bool(np.array_equal((moved @ w.T)[0], whole[7]))


needs_row_invariance = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreter_keeps_rows_apart(),
    reason="numpy's matmul on this CPU sums a row in an order that depends on its place",
)
