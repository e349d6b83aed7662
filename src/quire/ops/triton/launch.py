"""Helpers of all Triton kernels: where they can run, block sizes, launch options.

Knows the compiler and the interpreter. Does not know any kernel. With TRITON_INTERPRET=1, set before Triton is
imported, kernels run on the CPU through NumPy: slow, for tests. float32 and float16 are then right; bfloat16 and fp8
are not, because the interpreter rounds them differently than a device.
"""

from __future__ import annotations

import triton
from torch import Tensor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

EXACT = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Launch options of kernels that must give the same bits for every layout that the compiler chooses: it fuses a product
and a sum only where the kernel does so explicitly."""


def runs_on(x: Tensor) -> bool:
    """Whether a kernel can read this tensor."""
    return INTERPRETED or x.is_cuda


def pow2(n: int, least: int = 1) -> int:
    """The next power of two, as Triton needs for block sizes."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def side_by_side(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
