"""What a model says of its parts, for kernels that compute several of them in one call (`native/`).

A module says it with a method `native()`, which returns one of these, or of `decoder.py`, or None: then it is called as a
module. So the kernels know parts by their role, and no family. A part that the kernels do not support is called as a module, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from quire.layers.norm import Norm


class AttentionParts(NamedTuple):
    """`module` is a `SelfAttention` and computes the same. `value_norm_eps`: it also norms values, without a weight."""

    module: Any
    value_norm_eps: float | None = None


class LayerParts(NamedTuple):
    """A decoder layer.

    Attributes:
        norms: in the order of `LayerNorms`.
        attention, mlp: between the layer's norms, as in `DecoderLayer`; None: the layer's method does more.
        parallel: both read the first norm, as in `ParallelLayer`.
        finish: what comes after both; None: nothing.
        joined_attention: attention of a speculator's first layer, which reads cat(norm(embedding), norm(state)).
    """

    norms: Sequence[Norm | None]
    attention: nn.Module | None
    mlp: nn.Module | None
    residual_scale: float = 1.0
    parallel: bool = False
    finish: Callable[..., Any] | None = None
    joined_attention: nn.Module | None = None


def native_parts(module: object) -> Any:
    """What the module says of itself; None: nothing."""
    native = getattr(module, "native", None)
    return None if native is None else native()


def layer_parts(layer: object) -> LayerParts | None:
    """What a decoder layer says of itself; None: nothing."""
    parts = native_parts(layer)
    return parts if isinstance(parts, LayerParts) else None


def replaces(module: nn.Module, base: type[nn.Module], *names: str) -> bool:
    """Whether the module's class has other methods of these names than the base class."""
    return any(getattr(type(module), name) is not getattr(base, name) for name in names)
