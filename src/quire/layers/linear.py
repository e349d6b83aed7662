"""Linear layers: weights of one or several checkpoint tensors, stored and multiplied as a scheme says.

Knows parts and schemes. Does not know which scheme a checkpoint asks for (`quantization/base.py`).

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
    """One tensor of a scheme.

    `dim` runs along the outputs, `pack_factor` of them to an element (of each part of the layer, the last may be begun only).
    `per_part`: a tensor that every part has, whatever its outputs; the parameter holds them one after the other.
    `optional`: not every checkpoint has it; it then stays on "meta".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    pack_factor: int = 1
    per_part: bool = False
    optional: bool = False

    def lengths(self, outputs: Sequence[int]) -> list[int]:
        """Of the tensor of each part, along `dim`."""
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
        """Name (of the parameter, and the last part of the checkpoint's name) -> what it is."""
        ...

    def after_load(self, layer: Linear) -> None:
        """Once all weights are there: repack them."""
        ...

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        """x_TI -> y_TO, bias included."""
        ...

    def silu_gated(self, layer: Linear, x_TI: Tensor) -> Tensor:
        """silu(first half) * second half of what `apply` gives."""
        ...


class UnquantizedLinearMethod:
    """Weights as they are."""

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
        num_out: outputs; or {"q_proj": 64, "k_proj": 32, ...}: the parts, by their checkpoint names beside
            this layer, that are stored one after the other and multiplied at once.
        packed: the name under which some checkpoints hold all the parts already together.
        silu: the two halves of the outputs meet as silu(first) * second; call `silu_gated`.
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
        """Store weights another way. Only before they are loaded."""
        for name in [n for n in self._parameters if n != "bias"]:
            delattr(self, name)
        self.quant_method = scheme
        self.layout = dict(scheme.stored(self.num_in, self.num_out, self.dtype))
        for name, stored in self.layout.items():
            shape = stored.whole(self.outputs)
            set_parameter(self, name, torch.empty(shape, dtype=stored.dtype))

    @property
    def outputs(self) -> list[int]:
        """Of each part; of itself, if it has none."""
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
