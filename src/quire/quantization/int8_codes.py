"""int8 on a device of its own: the arithmetic of `int8.py`, by Triton's kernels (`ops/triton/int8_gemm.py`).

Knows when the kernels can run. Sums are of integers and what follows is done number by number, so the answer has the
bits of the definition, whoever gives it.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu.bindings import Kernels
from quire.ops.reference import silu_and_mul
from quire.quantization.base import runs_triton
from quire.quantization.int8 import Int8Weight


class Int8Codes(Int8Weight):
    """Rows lie one after the other, as they are stored; `kernels`, which are a CPU's, are not used."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor, gated: bool, kernels: Kernels | None = None):
        super().__init__(q_OI.contiguous(), scale_O.float().contiguous(), gated, None)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        x_TI = x_TI.reshape(-1, self.ins)
        if not runs_triton(x_TI):
            return self.plainly(x_TI, bias_O)
        from quire.ops.triton import int8_gemm

        weight = self.q_OI, self.scale_O
        y_TO = int8_gemm.product(int8_gemm.codes(x_TI), weight, bias_O, x_TI.dtype)
        return silu_and_mul(y_TO) if self.gated else y_TO
