"""bfloat16 weights in the layout of the CPU kernels: the same numbers in another order.

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.layers.weights import PANEL, PreparedWeight, WeightRef
from quire.ops.cpu.bindings import Kernels
from quire.platforms.memory import empty_in_huge_pages, read_ahead

TILE = 16  # rows that are packed together
AT_ONCE = 64 << 20  # bytes that one call packs, while the system reads as many from the files


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


class Packing:
    """Packs many weights by few calls of the kernels, straight from the mapped files, while the system reads ahead.

    A weight that `add` has replaced is complete after `finish`.
    """

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        self.parts: list[
            tuple[list[int], Tensor]
        ] = []  # RowsOfWeight of kernels/pack.cpp, its rows
        self.num_read, self.size = 0, 0  # parts that the files should have by now; bytes of others

    def add(self, ref: WeightRef) -> bool:
        """Replace a loaded weight by a packed one; False: it stays as it is."""
        outs, ins = ref.num_out, ref.num_in
        fits = PreparedWeight.fits(outs, ins, ref.gated, PANEL)
        if ref.weight.dtype != torch.bfloat16 or not fits:
            return False
        pieces = ref.pieces("weight")
        packed = PackedBf16Weight(self.kernels, outs, ins, ref.gated)
        if any(first % TILE or rows_OI.stride(1) != 1 for first, rows_OI in pieces):
            whole_OI = torch.empty(outs, ins, dtype=torch.bfloat16)
            for first, rows_OI in pieces:
                whole_OI[first : first + len(rows_OI)] = rows_OI
            pieces = [(0, whole_OI)]
        for first, rows_OI in pieces:
            end, count = first + len(rows_OI), len(rows_OI)
            rows = (packed.padded if end == outs else end) - first
            where = [
                rows_OI.data_ptr(),
                rows_OI.stride(0) * rows_OI.itemsize,
                count,
                packed.address,
            ]
            self.parts.append(([*where, first, rows, packed.padded, ins, ref.gated], rows_OI))
            read_ahead(rows_OI)
            self.size += rows_OI.nbytes
        ref.install(packed)
        if self.size >= AT_ONCE:
            self._pack(self.num_read)
            self.num_read, self.size = len(self.parts), 0
        return True

    def finish(self) -> None:
        self._pack(len(self.parts))

    def _pack(self, count: int) -> None:
        if count:
            table = torch.tensor([part for part, _ in self.parts[:count]])
            self.kernels.pack_weights(table.data_ptr(), count)
            del self.parts[:count]
