"""compressed-tensors checkpoints with integers: int8 with a scale per output or tensor; 1 to 8 bits packed, in groups.

Knows their tensors. It ignores stored activation scales: dynamic scales per token are finer.

Shape suffixes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.weights import Converted, WeightRef
from quire.quantization.checkpoint_format import (
    QuantizedFormat,
    by_output,
    optional_tensor,
    zero_points,
)
from quire.quantization.group_quant import dense
from quire.quantization.int8 import Int8Codes, Int8Weight


class CompressedInt8Format(QuantizedFormat):
    """weight [O, I] int8, weight_scale [O, 1] or [1]."""

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        return {
            "weight": CheckpointTensor((num_out, num_in), torch.int8),
            "weight_scale": scales(self.scheme.strategy, num_out),
        }

    def convert(self, ref: WeightRef) -> Converted:
        scale_O = scale_by_output(ref, self.scheme.strategy)
        weight = ref.tensor("weight")
        if self.accelerator:
            return Int8Codes(weight, scale_O, ref.gated)
        return Int8Weight(weight, scale_O, ref.gated, self.kernels(ref))


class CompressedPackedFormat(QuantizedFormat):
    """weight_packed [O, I / n], weight_scale [O, G], weight_zero_point [O / n, G], weight_g_idx [I]; n fields per word.

    The checkpoint stores fields and zero points as unsigned integers: the signed value plus half the range.
    """

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        per = Fraction(32, self.scheme.bits)
        groups = -(-num_in // self.scheme.group) if self.scheme.group > 0 else 1
        grouped = self.scheme.strategy == "group"
        zeros = CheckpointTensor((-(-num_out // per), groups), torch.int32, pack_factor=per)
        return {
            "weight_packed": CheckpointTensor((num_out, -(-num_in // per)), torch.int32),
            "weight_scale": CheckpointTensor((num_out, groups), torch.float32)
            if grouped
            else scales(self.scheme.strategy, num_out),
            "weight_g_idx": CheckpointTensor((num_in,), torch.int32, per_part=True, optional=True),
            **({} if self.scheme.symmetric else {"weight_zero_point": zeros}),
        }

    def convert(self, ref: WeightRef) -> Converted:
        bits = self.scheme.bits
        q_OI = dense(ref.tensor("weight_packed"), bits)[:, : ref.num_in]
        if self.scheme.strategy == "group":
            scale_OG = ref.tensor("weight_scale")
        else:
            scale_OG = scale_by_output(ref, self.scheme.strategy)[:, None]
        groups_PI = optional_tensor(ref, "weight_g_idx") if self.scheme.ordered else None
        zero_OG = self._zeros(ref, scale_OG)
        return self.grouped(ref, q_OI, scale_OG, zero_OG, bits, groups_PI)

    def _zeros(self, ref: WeightRef, scale_OG: Tensor) -> Tensor:
        bits = self.scheme.bits
        if self.scheme.symmetric:
            return torch.full_like(scale_OG, 1 << (bits - 1), dtype=torch.uint8)
        return zero_points(ref.tensor("weight_zero_point"), ref, bits)


def scales(strategy: str, num_out: int) -> CheckpointTensor:
    """One scale for the whole tensor, or one per output."""
    if strategy == "tensor":
        return CheckpointTensor((1,), torch.float32, per_part=True)
    return CheckpointTensor((num_out, 1), torch.float32)


def scale_by_output(ref: WeightRef, strategy: str) -> Tensor:
    scale = ref.tensor("weight_scale")
    return by_output(scale, ref) if strategy == "tensor" else scale.flatten()
