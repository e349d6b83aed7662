"""TorchAO checkpoints: the tensors of Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor, under other names.

    w = (qdata - zero_point) * scale, by row, tensor or group of inputs

They become what compressed-tensors stores: `weight` and `weight_scale` for 8 bits; for Intx, whose integers take a byte
each, `weight_packed`, `weight_scale` and `weight_zero_point`, unsigned.

Shape suffixes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.checkpoint_quantization import QuantizationScheme


def renamed(found: Mapping[str, Tensor], scheme: QuantizationScheme) -> dict[str, Tensor]:
    """The one tensor of `found` as compressed-tensors stores it."""
    ((name, tensor),) = found.items()
    packs = scheme.kind == "ct-packed"
    if name == "scale":
        return {"weight_scale": tensor}
    if name == "qdata":
        if not packs:
            return {"weight": tensor}
        return {"weight_packed": words(_unsigned(tensor, scheme.bits), scheme.bits)}
    if packs:  # zero points are packed along outputs
        zeros_GO = _unsigned(tensor, scheme.bits).T
        return {"weight_zero_point": words(zeros_GO, scheme.bits).T}
    if tensor.any():
        raise ValueError("zero points other than 0 are not supported")
    return {}


def _unsigned(values: Tensor, bits: int) -> Tensor:
    return (values.short() + (1 << (bits - 1))).to(torch.uint8)


def words(values: Tensor, bits: int) -> Tensor:
    """Bytes -> fields of 4 or 8 bits in int32, along the last dimension, the lowest first."""
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % (32 // bits)))
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values.contiguous().view(torch.int32)
