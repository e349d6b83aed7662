"""RMS norm.

Shape suffixes: T tokens, D features.
"""

from __future__ import annotations

from torch import Tensor

from quire.layers.weight_slots import Layer
from quire.ops.reference import add_rms_norm, rms_norm


class RMSNorm(Layer):
    """x scaled to unit mean square, times weight (times 1 + weight with `plus_one`)."""

    weight: Tensor
    is_called = False

    def __init__(self, size: int, eps: float, *, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.random_mean = 0.0 if plus_one else 1.0
        self.new("weight", size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps, self.plus_one)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum, and the sum."""
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps, self.plus_one)
