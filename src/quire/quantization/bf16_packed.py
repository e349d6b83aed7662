"""bfloat16 weights in the layout of the CPU kernels: the same numbers in another order. Knows one weight.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.layers.weights import PANEL, PreparedWeight
from quire.ops.cpu.bindings import Kernels
from quire.platforms.memory import empty_in_huge_pages


class PackedBf16Weight(PreparedWeight):
    """A bfloat16 weight in panels; O is padded to whole panels."""

    def __init__(self, kernels: Kernels, weight_OI: Tensor, gated: bool = False):
        outs, ins = weight_OI.shape
        super().__init__(outs, ins, gated, kernels)
        self.data = empty_in_huge_pages(self.padded * self.ins, torch.bfloat16)
        weight_OI = weight_OI.contiguous()
        kernels.pack(
            weight_OI.data_ptr(), self.data.data_ptr(), self.padded, self.outs, self.ins, gated
        )
        self.address = self.data.data_ptr()
        self.unpack = kernels.unpack_rows

    @staticmethod
    def takes(weight_OI: Tensor, gated: bool = False) -> bool:
        outs, ins = weight_OI.shape
        return weight_OI.dtype == torch.bfloat16 and PreparedWeight.fits(outs, ins, gated, PANEL)

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        kernels.linear(
            x_TI.data_ptr(), x_TI.stride(0), self.address, bias, y_TW.data_ptr(), y_TW.shape[1], len(x_TI),
            self.padded, self.ins, self.kernel_act,
        )  # fmt: skip

    def kernel_args(self) -> dict[str, Any]:
        return {"data": self.address}

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, [T, I]: the lookup in an embedding table that is packed as an LM head."""
        ids_T = ids_T.long().contiguous()
        found_TI = torch.empty((len(ids_T), self.ins), dtype=torch.bfloat16)
        self.unpack(self.address, ids_T.data_ptr(), found_TI.data_ptr(), *found_TI.shape)
        return found_TI
