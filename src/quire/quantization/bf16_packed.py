"""bfloat16 weights in the layout of the CPU kernels: the same numbers in another order.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.layers.prepared_weight import PANEL, PreparedWeight
from quire.layers.weights import WeightRef
from quire.ops.cpu.bindings import Kernels
from quire.platforms.memory import empty_in_huge_pages
from quire.quantization.packing import Packing

TILE = 16  # rows that are packed together


class PackedBf16Weight(PreparedWeight):
    """A bfloat16 weight in panels; O is padded to whole panels."""

    def __init__(self, kernels: Kernels, outs: int, ins: int, gated: bool = False):
        super().__init__(outs, ins, gated, kernels)
        self.data = empty_in_huge_pages(self.padded * self.ins, torch.bfloat16)
        self.address = self.data.data_ptr()
        self.unpack = kernels.unpack_rows

    @classmethod
    def of(cls, kernels: Kernels, weight_OI: Tensor, gated: bool = False) -> PackedBf16Weight:
        outs, ins = weight_OI.shape
        packed = cls(kernels, outs, ins, gated)
        weight_OI = weight_OI.contiguous()
        kernels.pack(
            weight_OI.data_ptr(), packed.address, packed.padded, packed.outs, packed.ins, gated
        )
        return packed

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


def pack_later(ref: WeightRef, packing: Packing, kernels: Kernels) -> bool:
    """Replace a loaded weight by a packed one, which is complete after `packing.finish`; False: it stays as it is."""
    outs, ins = ref.num_out, ref.num_in
    if ref.weight.dtype != torch.bfloat16 or not PreparedWeight.fits(outs, ins, ref.gated, PANEL):
        return False
    pieces = ref.pieces("weight")
    packed = PackedBf16Weight(kernels, outs, ins, ref.gated)
    if any(first % TILE or rows_OI.stride(1) != 1 for first, rows_OI in pieces):
        whole_OI = torch.empty(outs, ins, dtype=torch.bfloat16)
        for first, rows_OI in pieces:
            whole_OI[first : first + len(rows_OI)] = rows_OI
        pieces = [(0, whole_OI)]
    for first, rows_OI in pieces:
        end, step = first + len(rows_OI), rows_OI.stride(0) * rows_OI.itemsize
        rows = (packed.padded if end == outs else end) - first
        where = [rows_OI.data_ptr(), step, len(rows_OI), packed.address, first, rows]
        packing.add([*where, packed.padded, ins, ref.gated], rows_OI)
    ref.install(packed)
    return True
