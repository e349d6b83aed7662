"""PreparedWeight: a weight in the form that multiplies, quantized or packed.

Knows shapes, the CPU kernels' panels and the activation after the product. Does not know checkpoints: `weights.py` has the
weight of a layer, and each method in `quantization/` has its subclass.

Shape suffixes: T tokens, I inputs, O outputs, W width of the result: O, or half of it if gated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.cpu.bindings import Kernels
from quire.ops.cpu.structs import ACTIVATIONS, AFTER, HALVES, UNGATED_FROM
from quire.ops.experts import CodedWeight
from quire.ops.reference import act_and_mul, activate

PANEL = 32
"""Outputs that the CPU kernels compute at once."""


class PreparedWeight:
    """A weight [O, I] in the form of a quantization method, or packed: in panels for the CPU kernels, or in plain
    tensors without them.

    A subclass defines the form, the arguments of the kernels (`kernel_args`, `run`) and the meaning (`reference`).
    With `gated`, the result is act(first half of the outputs) * second half.
    """

    act = "silu"
    """The activation, if it is gated; `WeightRef.install` sets it."""
    after: str | None = None
    """The activation of the outputs, if it is not gated; `WeightRef.install` sets it."""

    halves = False
    """Whether the kernels' layout is a gated weight's, but not the product; see `before_activation`."""

    rows: Callable[[Tensor], Tensor] | None = None
    """ids_T -> rows of the weight, [T, I]; None if they cannot be read from this form."""

    def __init__(self, outs: int, ins: int, gated: bool, kernels: Kernels | None):
        self.outs, self.ins, self.gated, self.kernels = outs, ins, gated, kernels
        self.padded = -(-outs // PANEL) * PANEL  # whole panels

    @property
    def kernel_act(self) -> int:
        """The kernels' number of the activation; 0: none."""
        if self.halves:
            return HALVES
        if self.gated:
            return ACTIVATIONS[self.act]
        return 0 if self.after is None else UNGATED_FROM + AFTER[self.after]

    @staticmethod
    def fits(outs: int, ins: int, gated: bool, step: int) -> bool:
        """Whether the kernels can multiply a weight of this shape; `step`: inputs that they process at once."""
        return ins % step == 0 and (outs % (2 * PANEL) == 0 or not gated)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x times the weight transposed, plus bias."""
        if self.kernels is None:
            return self.reference(x_TI, bias_O)
        if x_TI.dim() != 2 or x_TI.stride(-1) != 1:
            x_TI = x_TI.reshape(-1, self.ins).contiguous()
        width = self.padded // 2 if self.gated else self.padded
        y_TW = torch.empty((len(x_TI), width), dtype=torch.bfloat16)
        bias_O = self.pad_bias(bias_O)
        self.run(self.kernels, x_TI, None if bias_O is None else bias_O.data_ptr(), y_TW)
        return y_TW if self.gated or self.padded == self.outs else y_TW[:, : self.outs]

    def before_activation(self) -> PreparedWeight:
        """The same weight, whose product has no activation: a gated one gives both halves."""
        if not self.gated and self.after is None:
            return self
        found = copy.copy(self)
        found.gated, found.halves, found.after = False, self.gated, None
        return found

    def pad_bias(self, bias_O: Tensor | None) -> Tensor | None:
        """The bias, padded to whole panels."""
        if bias_O is None or self.kernels is None or len(bias_O) == self.padded:
            return bias_O
        return F.pad(bias_O, (0, self.padded - len(bias_O)))

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        """Multiply by the kernels; `bias`: its address."""
        raise NotImplementedError

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Multiply in plain torch: the definition."""
        raise NotImplementedError

    def rounded(self, y_TO: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The end of a definition: adds the bias in the precision of y, rounds, then applies the activation."""
        y_TO = y_TO if bias_O is None else y_TO + bias_O.to(y_TO.dtype)
        return self.activated(y_TO.to(dtype))

    def activated(self, y_TO: Tensor) -> Tensor:
        if self.gated:
            return act_and_mul(y_TO, self.act)
        return y_TO if self.after is None else activate(y_TO, self.after)

    def move(self, device: torch.device) -> None:
        """Move the tensors to another device."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def coded(self) -> CodedWeight | None:
        """For the grouped products of experts on an accelerator; None: they do not take this form."""
        return None

    def kernel_args(self) -> dict[str, Any]:
        """Fields of the C struct `Weight` (kernels/layer.h), except the bias and the shape."""
        raise NotImplementedError(
            f"the fused layer kernel does not support a {type(self).__name__}"
        )


def addresses(**tensors: Tensor | None) -> dict[str, Any]:
    """Fields of a C struct."""
    return {name: None if each is None else each.data_ptr() for name, each in tensors.items()}
