"""Floats in the place of quantized layers, for parts of a model that multiply floats: vision towers.

Knows the checkpoint formats of `apply.FORMATS`, and by their names which tensors are parts of one weight. Does not know towers.

Shape suffixes: I inputs, O outputs, G groups, P parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.checkpoint_quantization import CheckpointQuantization, QuantizationScheme
from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.layers.weights import WeightRef
from quire.ops.cpu.bindings import Kernels
from quire.quantization.apply import FORMATS
from quire.quantization.checkpoint_format import QuantizedFormat, dequantized_groups
from quire.quantization.compressed_tensors import CompressedInt8Format, scale_by_output
from quire.quantization.dequantize_on_load import decoded

CPU = torch.device("cpu")
Parts = Mapping[str, Tensor]
PARTS = frozenset(
    "weight weight_scale weight_scale_inv weight_packed weight_shape weight_zero_point weight_g_idx qweight qzeros scales g_idx".split()
)
"""Last parts of the names of tensors that are a layer's weight."""


class FloatsFormat(QuantizedFormat):
    """Mixed into a format: its weight is floats, not rounded again."""

    def __init__(self, scheme: QuantizationScheme):
        super().__init__(scheme, make=lambda floats_OI, gated, kernels: floats_OI)  # type: ignore[arg-type,return-value]

    def kernels(self, ref: WeightRef) -> Kernels | None:
        return None

    def grouped(
        self, ref: WeightRef, q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, bits: int, groups_PI: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        return dequantized_groups(ref, q_OI, scale_OG, zero_OG, groups_PI)


class FloatsOfInt8(FloatsFormat, CompressedInt8Format):
    """Integers of 8 bits, times the scale of their output."""

    def convert(self, ref: WeightRef) -> Tensor:
        scale_O = scale_by_output(ref, self.scheme.strategy)
        return ref.tensor("weight").float() * scale_O[:, None]


AS_FLOATS = {kind: type(f"Floats{made.__name__}", (FloatsFormat, made), {}) for kind, made in FORMATS.items()}  # fmt: skip
AS_FLOATS["ct-int"] = FloatsOfInt8


def with_floats(
    found: Iterable[tuple[str, Tensor]], stored: CheckpointQuantization, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of towers, with a weight of floats in the place of the tensors of each quantized layer.

    Raises:
        ConfigError: tensors of a layer are missing, or do not fit together, or config.json does not say that it is quantized; the
            message names the layer.
    """
    stored = replace(stored, of_towers=True)
    waiting: dict[str, tuple[QuantizationScheme, dict[str, Tensor]]] = {}
    for name, tensor in decoded(found, stored, dtype):
        layer, _, part = name.rpartition(".")
        scheme = None if part == "bias" else stored.scheme_of(layer)
        plain = tensor.is_floating_point() and tensor.itemsize > 1 and part == "weight"
        if scheme is None and part == "weight" and not plain:
            raise ConfigError(f"weight {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, but config.json says that {layer} is not quantized")  # fmt: skip
        if scheme is None or plain or part not in PARTS or scheme.kind not in AS_FLOATS:
            yield name, tensor
        else:
            waiting.setdefault(layer, (scheme, {}))[1][part] = tensor
    for layer in list(waiting):
        scheme, parts = waiting.pop(layer)
        yield f"{layer}.weight", _floats(layer, scheme, parts).to(dtype)


def _floats(layer: str, scheme: QuantizationScheme, parts: Parts) -> Tensor:
    """[O, I]"""
    try:
        outs, ins = _shape(scheme, parts)
    except (KeyError, ValueError):
        raise _lacks(layer, parts) from None
    with torch.device("meta"):
        linear = Linear(ins, outs)
    checkpoint_format = AS_FLOATS[scheme.kind](scheme)
    linear.ref.use(checkpoint_format)
    for name, slot in linear.ref.slots(layer).items():
        part = name.rpartition(".")[2]
        if part in parts:
            slot.fill(parts[part], CPU, name)
        elif not slot.optional:
            raise _lacks(layer, parts)
    linear.join()
    made = checkpoint_format.convert(linear.ref)
    if not isinstance(made, Tensor):
        raise TypeError(f"{scheme.kind}: {type(made).__name__}")
    return made


def _shape(scheme: QuantizationScheme, parts: Parts) -> tuple[int, int]:
    """(outputs, inputs) of the weight that these tensors are."""
    if "weight_shape" in parts:
        outs, ins = parts["weight_shape"].tolist()
        return int(outs), int(ins)
    if scheme.kind == "awq":
        ins, words = parts["qweight"].shape
        return words * 8, ins
    if scheme.kind == "gptq":
        words, outs = parts["qweight"].shape
        return outs, words * 32 // scheme.bits
    if scheme.kind == "ct-packed":
        outs, words = parts["weight_packed"].shape
        return outs, words * 32 // scheme.bits
    outs, ins = parts["weight"].shape
    return outs, ins


def _lacks(layer: str, parts: Parts) -> ConfigError:
    return ConfigError(f"the checkpoint lacks tensors of the quantized layer {layer}: it has only {', '.join(sorted(parts))}")  # fmt: skip
