"""Linear layers: one or several checkpoint weights, stored and multiplied by a quantization method.

Knows parts and the interface of quantization methods. Does not know which method a checkpoint needs
(`quantization/apply.py`).

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.layers.weight_slots import Layer, WeightSlot, set_parameter
from quire.ops.reference import linear, silu_and_mul


class StoredTensor(NamedTuple):
    """One tensor of a quantization method.

    `dim`: the dimension of the outputs. One element holds `pack_factor` outputs; each part of the layer starts a new
    element. `per_part`: each part has one such tensor, whatever its number of outputs; the parameter concatenates them.
    `optional`: a checkpoint may lack it; the parameter then stays on "meta".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    pack_factor: int = 1
    per_part: bool = False
    optional: bool = False

    def lengths(self, outputs: Sequence[int]) -> list[int]:
        """Length of each part's tensor along `dim`."""
        return [1 if self.per_part else -(-part // self.pack_factor) for part in outputs]

    def whole(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Shape of the parameter that holds all parts."""
        total = sum(self.lengths(outputs))
        if self.per_part:
            return (total, *self.shape)
        return (*self.shape[: self.dim], total, *self.shape[self.dim + 1 :])


class LinearMethod(Protocol):
    """How the weights of a linear layer are stored, and how x is multiplied by them."""

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> Mapping[str, StoredTensor]:
        """Name -> tensor; the name is the parameter's and the last component of the checkpoint's."""
        ...

    def after_load(self, layer: Linear) -> None:
        """Repack the weights once all are loaded."""
        ...

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        """x_TI -> y_TO, bias included."""
        ...

    def silu_gated(self, layer: Linear, x_TI: Tensor) -> Tensor:
        """silu(first half) * second half of the outputs of `apply`."""
        ...


class UnquantizedLinearMethod:
    """Multiplies by the weight as the checkpoint stores it."""

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((num_out, num_in), dtype)}

    def after_load(self, layer: Linear) -> None:
        pass

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return linear(x_TI, layer.weight, layer.bias)

    def silu_gated(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return silu_and_mul(self.apply(layer, x_TI))


UNQUANTIZED = UnquantizedLinearMethod()


class Linear(Layer):
    """x times weight transposed, plus bias.

    Args:
        num_out: outputs; or parts {"q_proj": 64, "k_proj": 32, ...}, by their checkpoint names under this layer's
            parent. The layer concatenates the parts and multiplies by all of them at once.
        packed: the name under which some checkpoints store all parts concatenated.
        silu: the caller needs silu(first half) * second half of the outputs and calls `silu_gated`.
    """

    weight: Tensor
    bias: Tensor | None
    may_defer = True

    def __init__(
        self,
        num_in: int,
        num_out: int | Mapping[str, int],
        *,
        bias: bool = False,
        packed: str | None = None,
        silu: bool = False,
    ):
        super().__init__()
        self.silu = silu
        self.parts = dict(num_out) if isinstance(num_out, Mapping) else {}
        self.packed = packed
        self.num_in = num_in
        self.num_out = sum(self.parts.values()) if isinstance(num_out, Mapping) else num_out
        self.dtype = torch.get_default_dtype()
        if bias:
            self.new("bias", self.num_out)
        else:
            self.bias = None
        self.use(UNQUANTIZED)

    def use(self, scheme: LinearMethod) -> None:
        """Set the quantization method and register its parameters. Call it before weights are loaded."""
        for name in [n for n in self._parameters if n != "bias"]:
            delattr(self, name)
        self.quant_method = scheme
        self.layout = dict(scheme.stored(self.num_in, self.num_out, self.dtype))
        for name, stored in self.layout.items():
            shape = stored.whole(self.outputs)
            set_parameter(self, name, torch.empty(shape, dtype=stored.dtype))

    @property
    def outputs(self) -> list[int]:
        """Number of outputs of each part; of the layer, if it has no parts."""
        return list(self.parts.values()) or [self.num_out]

    def slots(self, path: str) -> dict[str, WeightSlot]:
        layout = dict(self.layout)
        if self.bias is not None:
            layout["bias"] = StoredTensor((self.num_out,), self.dtype)
        if not self.parts:
            return {
                f"{path}.{name}": WeightSlot(
                    self, name, per_part=stored.per_part, optional=stored.optional
                )
                for name, stored in layout.items()
            }
        parent = path.rpartition(".")[0]
        found = {}
        for name, stored in layout.items():
            if self.packed:
                whole = WeightSlot(self, name, per_part=stored.per_part, optional=stored.optional)
                found[f"{parent}.{self.packed}.{name}"] = whole
            start, dim = 0, 0 if stored.per_part else stored.dim
            for part, length in zip(self.parts, stored.lengths(self.outputs), strict=True):
                slot = WeightSlot(self, name, dim, start, length, stored.per_part, stored.optional)
                found[f"{parent}.{part}.{name}"] = slot
                start += length
        return found

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.quant_method.apply(self, x_TI)

    def silu_gated(self, x_TI: Tensor) -> Tensor:
        """silu(first half) * second half of the outputs."""
        return self.quant_method.silu_gated(self, x_TI)

    def extra_repr(self) -> str:
        return f"{self.num_in} -> {self.parts or self.num_out}, bias={self.bias is not None}"
