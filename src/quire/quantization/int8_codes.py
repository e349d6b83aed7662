"""int8 on an accelerator: the arithmetic of `int8.py`, by Triton kernels (`ops/triton/int8_gemm.py`).

Knows when the kernels can run. Sums are of integers and the rest is elementwise, so kernels and definition give the
same bits.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu.bindings import Kernels
from quire.ops.dispatch import runs_triton
from quire.ops.reference import silu_and_mul
from quire.quantization.int8 import Int8Weight


class Int8Codes(Int8Weight):
    """An int8 weight in row-major order, as checkpoints store it; ignores `kernels`, which are the CPU's."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor, gated: bool, kernels: Kernels | None = None):
        super().__init__(q_OI.contiguous(), scale_O.float().contiguous(), gated, None)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        x_TI = x_TI.reshape(-1, self.ins)
        if not runs_triton(x_TI):
            return self.reference(x_TI, bias_O)
        from quire.ops.triton import int8_gemm

        weight = self.q_OI, self.scale_O
        y_TO = int8_gemm.product(int8_gemm.codes(x_TI), weight, bias_O, x_TI.dtype)
        return silu_and_mul(y_TO) if self.gated else y_TO
