"""int8, made while loading: each row of a weight has one scale, each token's activations another.

Knows linears and the head, once they are filled. Does not know checkpoints. No calibration: scales of weights follow
from the weights, those of activations from each token at hand, so a token's numbers do not depend on its company.
Sums are of integers, hence exact.

    y = bias + scale_w * scale_x * sum (x_q * w_q),    x_q = round(127 x / max |x|),    w_q = round(127 w / max |w|)

The embedding's table stays as it is. Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.embedding import Head
from quire.layers.linear import Linear, Plain
from quire.layers.weights import set_parameter
from quire.ops.cpu.library import Kernels, best
from quire.ops.reference import silu_and_mul

PANEL, STEP = 32, 64
MOST = 127


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [O, I], float32 scale [O]); of activations [T, I] in the same way, a scale a token."""
    rows_OI = weight_OI.float()
    top_O = rows_OI.abs().amax(1)
    factor_O = torch.where(top_O > 0, MOST / top_O, torch.zeros_like(top_O))
    return (rows_OI * factor_O[:, None]).round_().to(torch.int8), top_O / MOST


class Int8Weight:
    """One weight: by the kernels where they run and it is bf16, else in plain torch with the same integers."""

    def __init__(self, weight_OI: Tensor, gated: bool, kernels: Kernels | None):
        self.outs, self.ins = weight_OI.shape
        self.gated = gated
        bf16 = weight_OI.dtype == torch.bfloat16
        self.kernels = kernels if bf16 and self.fits(kernels) else None
        q_OI, scale_O = quantize(weight_OI)
        if self.kernels is None:
            self.q_OI, self.scale_O = q_OI, scale_O
            return
        padded = -(-self.outs // PANEL) * PANEL
        self.padded = padded
        self.data = torch.empty(padded * self.ins, dtype=torch.int8)
        self.kernels.pack_int8(
            q_OI.data_ptr(), self.data.data_ptr(), padded, self.outs, self.ins, gated
        )
        self.scale_O = torch.nn.functional.pad(scale_O, (0, padded - self.outs))
        sum_O = q_OI.sum(1, dtype=torch.int32) * 128
        self.sum_O = torch.nn.functional.pad(sum_O, (0, padded - self.outs))

    def fits(self, kernels: Kernels | None) -> bool:
        whole = self.outs % (2 * PANEL) == 0 if self.gated else True
        return kernels is not None and self.ins % STEP == 0 and whole

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """y_TO; silu(first half) * second half of it, if gated."""
        if self.kernels is None:
            return self.plainly(x_TI, bias_O)
        if x_TI.dim() != 2 or x_TI.stride(-1) != 1:
            x_TI = x_TI.reshape(-1, self.ins).contiguous()
        rows, width = len(x_TI), self.padded // 2 if self.gated else self.padded
        y = torch.empty((rows, width), dtype=torch.bfloat16)
        if bias_O is not None and self.padded != self.outs:
            bias_O = torch.nn.functional.pad(bias_O, (0, self.padded - self.outs))
        self.kernels.linear_int8(
            x_TI.data_ptr(), x_TI.stride(0), self.data.data_ptr(), self.scale_O.data_ptr(), self.sum_O.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(), y.data_ptr(), width, rows, self.padded, self.ins, self.gated,
        )  # fmt: skip
        return y if self.gated or self.padded == self.outs else y[:, : self.outs]

    def plainly(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition. Integers up to 127 * 127 * I are exact in float64."""
        x_q, scale_T = quantize(x_TI)
        sums = (x_q.double() @ self.q_OI.double().T).float()
        y = sums * (scale_T[:, None] * self.scale_O)
        y = (y if bias_O is None else y + bias_O.float()).to(x_TI.dtype)
        return silu_and_mul(y) if self.gated else y


class Int8Linear(Plain):
    """The scheme of a linear whose weight was made to int8."""

    def __init__(self, weight: Int8Weight):
        self.weight = weight

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return self.weight.multiply(x_TI, layer.bias)

    def silu_gated(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return self.weight.multiply(x_TI, layer.bias)


def quantize_model(model: nn.Module) -> int:
    """Make every linear and the head int8, one after the other; how many."""
    kernels, count = best(), 0
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.scheme = Int8Linear(Int8Weight(layer.weight, layer.silu, kernels))
            set_parameter(layer, "weight", layer.weight.to("meta"))
            count += 1
        elif isinstance(layer, Head):
            layer.multiply = Int8Weight(layer.table_VD, False, kernels).multiply
            if layer.table is layer:
                set_parameter(layer, "weight", layer.table_VD.to("meta"))
            count += 1
    return count
