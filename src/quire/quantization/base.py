"""The base class of prepared weights, and how a linear layer gets one.

Knows linear layers with loaded weights. Does not know checkpoints, or the arithmetic of a quantization method.

Shape suffixes: T tokens, I inputs, O outputs, W width of the result: O, or half of it if gated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.linear import Linear, UnquantizedLinearMethod
from quire.layers.weight_slots import set_parameter
from quire.ops.cpu.bindings import Kernels

PANEL = 32


class Weight:
    """One weight [O, I], ready to multiply: in panels for the CPU kernels, or in plain tensors without them.

    A subclass defines the layout, the arguments of the kernels (`told`, `run`) and the meaning (`plainly`).
    With `gated`, the result is silu(first half of the outputs) * second half.
    """

    def __init__(self, outs: int, ins: int, gated: bool, kernels: Kernels | None):
        self.outs, self.ins, self.gated, self.kernels = outs, ins, gated, kernels
        self.padded = -(-outs // PANEL) * PANEL  # whole panels

    @staticmethod
    def fits(outs: int, ins: int, gated: bool, step: int) -> bool:
        """Whether the kernels can multiply a weight of this shape; `step`: inputs that they process at once."""
        return ins % step == 0 and (outs % (2 * PANEL) == 0 or not gated)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x times the weight transposed, plus bias."""
        if self.kernels is None:
            return self.plainly(x_TI, bias_O)
        if x_TI.dim() != 2 or x_TI.stride(-1) != 1:
            x_TI = x_TI.reshape(-1, self.ins).contiguous()
        width = self.padded // 2 if self.gated else self.padded
        y_TW = torch.empty((len(x_TI), width), dtype=torch.bfloat16)
        bias_O = self.whole(bias_O)
        self.run(self.kernels, x_TI, None if bias_O is None else bias_O.data_ptr(), y_TW)
        return y_TW if self.gated or self.padded == self.outs else y_TW[:, : self.outs]

    def whole(self, bias_O: Tensor | None) -> Tensor | None:
        """The bias, padded to whole panels."""
        if bias_O is None or self.kernels is None or len(bias_O) == self.padded:
            return bias_O
        return F.pad(bias_O, (0, self.padded - len(bias_O)))

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        """Multiply by the kernels; `bias`: its address."""
        raise NotImplementedError

    def plainly(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Multiply in plain torch: the definition."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """All tensors of this weight."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def to(self, device: torch.device) -> None:
        """Move all tensors to the device."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def told(self) -> dict[str, Any]:
        """Fields of the C struct `Weight` (kernels/layer.h), except the bias and the shape."""
        raise NotImplementedError


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on x's device."""
    try:
        from quire.ops.triton.launch import runs_on
    except ImportError:
        return False
    return runs_on(x)


class PreparedLinearMethod(UnquantizedLinearMethod):
    """The quantization method of a linear layer that multiplies by a `Weight`."""

    def __init__(self, weight: Weight):
        self.weight = weight

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return self.weight.multiply(x_TI, layer.bias)

    silu_gated = apply


def install_weight(layer: Linear, weight: Weight) -> None:
    """Make the linear layer multiply by `weight`, and free its other tensors."""
    layer.quant_method = PreparedLinearMethod(weight)
    bias = weight.whole(layer.bias)
    if bias is not None and bias is not layer.bias:
        set_parameter(layer, "bias", bias)
    for name in [n for n in layer._parameters if n not in ("bias", "weight")]:
        delattr(layer, name)
    free_weight(layer, weight.outs, weight.ins)


def free_weight(layer: nn.Module, outs: int, ins: int) -> None:
    """Replace the layer's own weight by a "meta" tensor, which has a shape and no memory."""
    dtype = getattr(layer, "dtype", None) or layer.get_parameter("weight").dtype
    set_parameter(layer, "weight", torch.empty(outs, ins, dtype=dtype, device="meta"))
