"""Where the kernels of these tests run, and in which formats.

The interpreter rounds bfloat16 and 8-bit floats otherwise than a device does: these wait for one.
"""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.device),
]
