"""Checkpoints of 8-bit floats, whoever wrote them: made int8 with a scale a row, since a CPU multiplies bytes.

Knows their tensors: the weight, and its scale for the whole, for each row, or for each block.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.linear import Linear, Stored
from quire.quantization.base import settle
from quire.quantization.compressed import scale_by_output, scales
from quire.quantization.stored import AsStored, kernels_for


class Float8(AsStored):
    """weight [O, I] float8_e4m3, weight_scale [1], [O, 1] or by blocks (there it may be called weight_scale_inv)."""

    @property
    def scale(self) -> str:
        return "weight_scale_inv" if self.layout.inverse else "weight_scale"

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, Stored]:
        high, wide = self.layout.block
        blocks = (-(-num_out // high), -(-num_in // wide))
        by_block = Stored(blocks, torch.float32, per=high)
        found = (
            by_block if self.layout.strategy == "block" else scales(self.layout.strategy, num_out)
        )
        return {
            "weight": Stored((num_out, num_in), torch.float8_e4m3fn),
            self.scale: found,
        }

    def become(self, layer: Linear) -> None:
        weight_OI = layer.get_parameter("weight").float()
        if self.layout.strategy == "block":
            weight_OI *= self._by_block(layer)
        else:
            weight_OI *= scale_by_output(layer, self.layout.strategy)[:, None]
        settle(layer, self.make(weight_OI, layer.silu, kernels_for(layer.dtype)))

    def _by_block(self, layer: Linear) -> Tensor:
        high, wide = self.layout.block
        scale = layer.get_parameter(self.scale).data
        parts, at = [], 0
        for width in layer.outputs:  # blocks begin anew in each part
            rows = -(-width // high)
            parts.append(scale[at : at + rows].repeat_interleave(high, 0)[:width])
            at += rows
        return torch.cat(parts).repeat_interleave(wide, 1)[:, : layer.num_in]
