"""fp8 checkpoints of all writers: a CPU multiplies integers, so it converts them to int8; an accelerator keeps them.

Knows their tensors: the weight, and its scale for the whole tensor, per output, or per block.

Shape suffixes: I inputs, O outputs, R groups of outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.weights import Converted, WeightRef
from quire.logging import get_logger
from quire.quantization.checkpoint_format import QuantizedFormat
from quire.quantization.compressed_tensors import scale_by_output, scales
from quire.quantization.fp8 import WIDTHS, Float8Weight

log = get_logger(__name__)


class RequantizedFp8Format(QuantizedFormat):
    """weight [O, I] float8_e4m3; weight_scale [1], [O, 1], or [R, G] for blocks (then maybe named weight_scale_inv)."""

    @property
    def scale(self) -> str:
        return "weight_scale_inv" if self.scheme.inverse else "weight_scale"

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        high, wide = self.scheme.block
        blocks = (-(-num_out // high), -(-num_in // wide))
        by_block = CheckpointTensor(blocks, torch.float32, pack_factor=high)
        found = (
            by_block if self.scheme.strategy == "block" else scales(self.scheme.strategy, num_out)
        )
        return {
            "weight": CheckpointTensor((num_out, num_in), torch.float8_e4m3fn),
            self.scale: found,
        }

    def convert(self, ref: WeightRef) -> Converted:
        return self.make(self.floats(ref), ref.gated, self.kernels(ref))

    def floats(self, ref: WeightRef) -> Tensor:
        """The dequantized weight, [O, I]."""
        weight_OI = ref.tensor("weight").float()
        if self.scheme.strategy == "block":
            scale_OI = self.by_row(ref).repeat_interleave(self.scheme.block[1], 1)
            return weight_OI * scale_OI[:, : ref.num_in]
        return weight_OI * scale_by_output(ref, self.scheme.strategy)[:, None]

    def by_row(self, ref: WeightRef) -> Tensor:
        """Scales of blocks, repeated for each output: [O, G]."""
        high = self.scheme.block[0]
        scale = ref.tensor(self.scale)
        parts, start = [], 0
        for width in ref.outputs:  # each part starts a new block
            rows = -(-width // high)
            parts.append(scale[start : start + rows].repeat_interleave(high, 0)[:width])
            start += rows
        return torch.cat(parts)


class Fp8Format(RequantizedFp8Format):
    """The same, multiplied as fp8 without a second rounding.

    One scale for a whole part becomes one per output, so that parts with different scales form one matrix.
    """

    def convert(self, ref: WeightRef) -> Converted:
        q_OI, strategy = ref.tensor("weight"), self.scheme.strategy
        high, wide = self.scheme.block
        if strategy != "block":
            return Float8Weight(q_OI, scale_by_output(ref, strategy), ref.gated)
        if wide not in WIDTHS:
            log.warning(
                "fp8 blocks of %d inputs are quantized again, with one scale per output", wide
            )
            return Float8Weight.of(self.floats(ref), ref.gated)
        if any(width % high for width in ref.outputs[:-1]):
            return Float8Weight(q_OI, self.by_row(ref), ref.gated, wide)
        return Float8Weight(q_OI, ref.tensor(self.scale), ref.gated, wide, high)
