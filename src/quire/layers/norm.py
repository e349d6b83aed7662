"""Norms over the last dimension.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.layers.weight_slots import Layer
from quire.ops.reference import add_rms_norm, layer_norm, rms_norm


class Norm(Layer):
    """The base of norms."""

    weight: Tensor
    is_called = False

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum. It may overwrite both arguments."""
        total_TD = residual_TD + x_TD
        normed_TD: Tensor = self(total_TD)
        return normed_TD, total_TD


NormFactory = Callable[[int], Norm]
"""From a size to a norm."""


class RMSNorm(Norm):
    """x scaled to unit mean square, times weight (times 1 + weight with `plus_one`)."""

    def __init__(self, size: int, eps: float, *, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.random_mean = 0.0 if plus_one else 1.0
        self.new("weight", size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps, self.plus_one)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps, self.plus_one)


class LayerNorm(Norm):
    """x minus its mean, scaled to unit variance, times weight, plus bias if it has one, in float32.

    With several sizes, the weight has these dimensions, and the norm is over the last.
    """

    bias: Tensor | None
    random_mean = 1.0

    def __init__(self, *sizes: int, eps: float, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.new("weight", *sizes)
        self.register_parameter("bias", None)
        if bias:
            self.new("bias", *sizes)

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight, self.eps, self.bias)
