"""How large the values of an adapter may be. Finite but absurd ones would make the logits of its requests NaN.

Knows tensors and the scale of a module. Does not know names of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from quire.errors import ValidationError

if TYPE_CHECKING:
    from torch import Tensor

MOST_VALUE = 1e4
"""The largest value of a tensor. In trained adapters it is near 1, and float16 ends at 65,504."""
MOST_CHANGE = 1e6
"""Of what an adapter adds to an element of a weight: at most rank times scale times the largest values of A and B."""


def check_values(name: str, tensor: Tensor) -> None:
    """Raises ValidationError: a value of the tensor is not finite, or too large."""
    if not tensor.isfinite().all():
        raise ValidationError(f"{name!a:.200} has values that are not finite")
    if (largest := _largest(tensor)) > MOST_VALUE:
        raise ValidationError(
            f"{name!a:.200} has the value {largest:.3g}, at most {MOST_VALUE:g} can be served: train the adapter again"
        )


def check_change(module: str, factors: Iterable[Tensor], rank: int, scale: float) -> None:
    """Raises ValidationError: the product of the factors may change a weight by more than any model can use."""
    change = rank * abs(scale) * prod(map(_largest, factors))
    if change > MOST_CHANGE:
        raise ValidationError(
            f"lora_alpha (or alpha_pattern) and the factors of {module!a:.200} change weights by up to {change:.2g}, at most"
            f" {MOST_CHANGE:g} can be served: correct lora_alpha, or train the adapter again"
        )


def _largest(tensor: Tensor) -> float:
    """The largest absolute value."""
    return max(abs(float(value)) for value in tensor.aminmax()) if tensor.numel() else 0.0
