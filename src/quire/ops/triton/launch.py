"""What all Triton kernels share: where they can run, and sizes.

Knows Triton's two ways to run. Does not know any kernel. With TRITON_INTERPRET=1, set before Triton is imported,
kernels run on the CPU through NumPy: slow, and for tests; then float32 and float16 are right, and bfloat16 and
8-bit floats are not (the interpreter rounds them otherwise than a device does).
"""

from __future__ import annotations

import triton
from torch import Tensor

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

EXACT = {} if INTERPRETED else {"enable_fp_fusion": False}
"""Launch options of kernels that must give the same bits however the compiler lays them out: a product and a
sum become one instruction only where the kernel says so."""


def runs_on(x: Tensor) -> bool:
    """Can a kernel read this tensor?"""
    return INTERPRETED or x.is_cuda


def pow2(n: int, least: int = 1) -> int:
    """The next power of two: Triton's blocks have such sizes."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def side_by_side(x: Tensor) -> Tensor:
    """As it is, if its features lie next to each other; else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
