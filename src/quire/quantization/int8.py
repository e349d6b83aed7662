"""int8 on CPUs and accelerators: one scale per output of the weight, one dynamic scale per token of activations.

Knows one weight. No calibration: a token's activations alone determine their scale, so the method is batch-invariant.
Sums are of integers, hence exact.

    y = bias + scale_w * scale_x * sum (x_q * w_q),    x_q = round(127 x / max |x|),    w_q likewise, or as stored

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.layers.prepared_weight import PreparedWeight, addresses
from quire.ops.cpu.bindings import Kernels
from quire.ops.dispatch import runs_triton
from quire.ops.experts import CodedWeight
from quire.platforms.memory import empty_in_huge_pages

STEP = 64
MOST = 127
MAX_FLOATS = 1 << 20  # weights that are float32 at a time while loading


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes [O, I], float32 scales [O]); for activations [T, I] likewise, with one scale per token."""
    rows_OI = weight_OI.float()
    top_O = rows_OI.abs().amax(1)
    factor_O = torch.full_like(top_O, MOST) / top_O  # torch computes 127 / x as 127 * (1 / x)
    factor_O[top_O == 0] = 0
    return (rows_OI * factor_O[:, None]).round_().to(torch.int8), top_O / MOST


def quantize_by(kernels: Kernels | None, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize`, by the kernels where possible: the same numbers, many times faster."""
    outs, ins = weight_OI.shape
    if kernels is None or weight_OI.dtype != torch.bfloat16 or ins % 16:
        return by_rows(quantize, weight_OI, torch.int8, MAX_FLOATS)
    q_OI, scale_O = torch.empty(outs, ins, dtype=torch.int8), torch.empty(outs)
    weight_OI = weight_OI.contiguous()
    kernels.quantize_rows(weight_OI.data_ptr(), outs, ins, q_OI.data_ptr(), scale_O.data_ptr())
    return q_OI, scale_O


def by_rows(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    weight_OI: Tensor,
    dtype: torch.dtype,
    at_once: int,
) -> tuple[Tensor, Tensor]:
    """`quantize`, some rows at a time: about `at_once` weights are float32 at a time."""
    outs, ins = weight_OI.shape
    q_OI = torch.empty(outs, ins, dtype=dtype, device=weight_OI.device)
    scale_O = torch.empty(outs, device=weight_OI.device)
    many = max(1, at_once // ins)
    for start in range(0, outs, many):
        rows = slice(start, start + many)
        q_OI[rows], scale_O[rows] = quantize(weight_OI[rows])
    return q_OI, scale_O


class Int8Weight(PreparedWeight):
    """Multiplied by the kernels where they run and activations are bf16, else in plain torch with the same integers.

    Args:
        q_OI, scale_O: the weight is their product; int8 and float32.
        kernels: None, unless activations are bf16.
    """

    def __init__(self, q_OI: Tensor, scale_O: Tensor, gated: bool, kernels: Kernels | None):
        outs, ins = q_OI.shape
        kernels = kernels if self.fits(outs, ins, gated, STEP) else None
        super().__init__(outs, ins, gated, kernels)
        if kernels is None:
            self.q_OI, self.scale_O = q_OI, scale_O
            return
        q_OI = q_OI.contiguous()
        self.data = empty_in_huge_pages(self.padded * ins, torch.int8)
        kernels.pack_int8(q_OI.data_ptr(), self.data.data_ptr(), self.padded, outs, ins, gated)
        missing = (0, self.padded - outs)
        self.scale_O = F.pad(scale_O, missing).contiguous()
        # In chunks, because torch's sum copies its whole input to the dtype of the result.
        sums = [part.sum(1, dtype=torch.int32) for part in q_OI.split(max(1, MAX_FLOATS // ins))]
        self.sum_O = F.pad(torch.cat(sums) * 128, missing)

    @classmethod
    def of(cls, weight_OI: Tensor, gated: bool, kernels: Kernels | None) -> Int8Weight:
        """Quantize a weight of any float dtype."""
        return cls(*quantize_by(kernels, weight_OI), gated, kernels)

    @classmethod
    def unfilled(cls, outs: int, ins: int, gated: bool, kernels: Kernels) -> Int8Weight:
        """A weight whose numbers the kernels will write."""
        made = cls.__new__(cls)
        PreparedWeight.__init__(made, outs, ins, gated, kernels)
        made.data = empty_in_huge_pages(made.padded * ins, torch.int8)
        made.scale_O = torch.zeros(made.padded)
        made.sum_O = torch.zeros(made.padded, dtype=torch.int32)
        return made

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        kernels.linear_int8(
            x_TI.data_ptr(), x_TI.stride(0), self.data.data_ptr(), self.scale_O.data_ptr(), self.sum_O.data_ptr(),
            bias, y_TW.data_ptr(), y_TW.shape[1], len(x_TI), self.padded, self.ins, self.kernel_act,
        )  # fmt: skip

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition. Integers up to 127 * 127 * I are exact in float64."""
        x_q, scale_T = quantize(x_TI)
        sums = (x_q.double() @ self.q_OI.double().T).float()
        return self.rounded(sums * (scale_T[:, None] * self.scale_O), bias_O, x_TI.dtype)

    def kernel_args(self) -> dict[str, Any]:
        return addresses(data=self.data, scale=self.scale_O, sum=self.sum_O)


class Int8Codes(Int8Weight):
    """int8 on an accelerator: the same arithmetic by Triton kernels, which give the definition's bits. The weight is in
    row-major order, as checkpoints store it; `kernels` are the CPU's and are ignored."""

    def __init__(self, q_OI: Tensor, scale_O: Tensor, gated: bool, kernels: Kernels | None = None):
        super().__init__(q_OI.contiguous(), scale_O.float().contiguous(), gated, None)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        x_TI = x_TI.reshape(-1, self.ins)
        if not runs_triton(x_TI):
            return self.reference(x_TI, bias_O)
        from quire.ops.triton import int8_gemm

        weight = self.q_OI, self.scale_O
        return self.activated(int8_gemm.product(int8_gemm.codes(x_TI), weight, bias_O, x_TI.dtype))

    def coded(self) -> CodedWeight:
        return CodedWeight(self.q_OI, self.scale_O)
