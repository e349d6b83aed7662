"""fp8 checkpoints of all writers: a CPU multiplies integers, so it converts them to int8; an accelerator keeps them.

Knows their tensors: the weight, and its scale for the whole tensor, per output, or per block.

Shape suffixes: I inputs, O outputs, R groups of outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear, StoredTensor
from quire.logging import get_logger
from quire.quantization.base import install_weight
from quire.quantization.checkpoint_scheme import CheckpointLinearMethod
from quire.quantization.compressed_tensors import scale_by_output, scales
from quire.quantization.fp8 import WIDTHS, Float8Weight

log = get_logger(__name__)


class Float8(CheckpointLinearMethod):
    """weight [O, I] float8_e4m3; weight_scale [1], [O, 1], or [R, G] for blocks (then maybe named weight_scale_inv)."""

    @property
    def scale(self) -> str:
        return "weight_scale_inv" if self.layout.inverse else "weight_scale"

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, StoredTensor]:
        high, wide = self.layout.block
        blocks = (-(-num_out // high), -(-num_in // wide))
        by_block = StoredTensor(blocks, torch.float32, pack_factor=high)
        found = (
            by_block if self.layout.strategy == "block" else scales(self.layout.strategy, num_out)
        )
        return {
            "weight": StoredTensor((num_out, num_in), torch.float8_e4m3fn),
            self.scale: found,
        }

    def convert(self, layer: Linear) -> None:
        install_weight(layer, self.make(self.floats(layer), layer.silu, self.kernels(layer)))

    def floats(self, layer: Linear) -> Tensor:
        """The dequantized weight, [O, I]."""
        weight_OI = layer.get_parameter("weight").float()
        if self.layout.strategy == "block":
            scale_OI = self.by_row(layer).repeat_interleave(self.layout.block[1], 1)
            return weight_OI * scale_OI[:, : layer.num_in]
        return weight_OI * scale_by_output(layer, self.layout.strategy)[:, None]

    def by_row(self, layer: Linear) -> Tensor:
        """Scales of blocks, repeated for each output: [O, G]."""
        high = self.layout.block[0]
        scale = layer.get_parameter(self.scale).data
        parts, at = [], 0
        for width in layer.outputs:  # each part starts a new block
            rows = -(-width // high)
            parts.append(scale[at : at + rows].repeat_interleave(high, 0)[:width])
            at += rows
        return torch.cat(parts)


class Float8Kept(Float8):
    """The same, multiplied as fp8 without a second rounding.

    One scale for a whole part becomes one per output, so that parts with different scales form one matrix.
    """

    def convert(self, layer: Linear) -> None:
        q_OI, strategy = layer.get_parameter("weight").data, self.layout.strategy
        high, wide = self.layout.block
        if strategy != "block":
            weight = Float8Weight(q_OI, scale_by_output(layer, strategy), layer.silu)
        elif wide not in WIDTHS:
            log.warning("blocks of %d inputs are made anew, with a scale a row", wide)
            install_weight(layer, Float8Weight.of(self.floats(layer), layer.silu))
            return
        elif any(width % high for width in layer.outputs[:-1]):
            weight = Float8Weight(q_OI, self.by_row(layer), layer.silu, wide)
        else:
            scale_RG = layer.get_parameter(self.scale).data
            weight = Float8Weight(q_OI, scale_RG, layer.silu, wide, high)
        install_weight(layer, weight)
