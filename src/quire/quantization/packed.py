"""Packed weights: bf16 linears, the head and the embedding's table by our kernels.

Knows linears and tables that are filled. Does not know checkpoints. A weight is repacked once and the original is let
go: its parameter stays as a shape without memory ("meta").

Shape suffixes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding, Head
from quire.layers.linear import PLAIN, Linear, Plain
from quire.layers.weights import set_parameter
from quire.ops.cpu.library import Kernels, best

PANEL = 32


class Packed:
    """One weight [O, I] in the kernels' layout; O is filled up to whole panels."""

    def __init__(self, kernels: Kernels, weight_OI: Tensor, gated: bool = False):
        self.kernels, self.gated = kernels, gated
        self.outs, self.ins = weight_OI.shape
        self.padded = -(-self.outs // PANEL) * PANEL
        self.data = torch.empty(self.padded * self.ins, dtype=torch.bfloat16)
        weight_OI = weight_OI.contiguous()
        kernels.pack(
            weight_OI.data_ptr(), self.data.data_ptr(), self.padded, self.outs, self.ins, gated
        )
        self.address = self.data.data_ptr()

    @staticmethod
    def fits(weight_OI: Tensor, gated: bool = False) -> bool:
        outs, ins = weight_OI.shape
        whole = outs % (2 * PANEL) == 0 if gated else True
        return weight_OI.dtype == torch.bfloat16 and ins % PANEL == 0 and whole

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x times the weight transposed, plus bias; silu(first half) * second half of that, if gated."""
        if x_TI.stride(-1) != 1 or x_TI.dim() != 2:
            x_TI = x_TI.reshape(-1, self.ins).contiguous()
        rows, width = len(x_TI), self.padded // 2 if self.gated else self.padded
        y = torch.empty((rows, width), dtype=torch.bfloat16)
        bias = None
        if bias_O is not None:
            if self.padded != self.outs:
                bias_O = torch.nn.functional.pad(bias_O, (0, self.padded - self.outs))
            bias = bias_O.data_ptr()
        self.kernels.linear(
            x_TI.data_ptr(), x_TI.stride(0), self.address, bias, y.data_ptr(), width, rows, self.padded, self.ins, self.gated
        )  # fmt: skip
        return y if self.gated or self.padded == self.outs else y[:, : self.outs]

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, [T, I]: an embedding table that is packed as a head."""
        panels = self.data.view(-1, self.ins // 32, 2, 16, 16, 2)
        ids_T = ids_T.long()
        found = panels[ids_T // 32, :, ids_T % 32 // 16, :, ids_T % 16]
        return found.reshape(len(ids_T), self.ins)


class PackedLinear(Plain):
    """The scheme of a linear whose weight is packed."""

    def __init__(self, packed: Packed):
        self.packed = packed

    def apply(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return self.packed.multiply(x_TI, layer.bias)

    def silu_gated(self, layer: Linear, x_TI: Tensor) -> Tensor:
        return self.packed.multiply(x_TI, layer.bias)


def pack_model(model: nn.Module) -> int:
    """Repack what fits, layer by layer, so that at most one weight exists twice; how many were."""
    kernels = best()
    if kernels is None:
        return 0
    count = 0
    tables: dict[int, Packed] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.scheme is PLAIN:
            if Packed.fits(layer.weight, layer.silu):
                packed = Packed(kernels, layer.weight, layer.silu)
                layer.scheme = PackedLinear(packed)
                _let_go(layer)
                count += 1
        elif isinstance(layer, Head) and layer.plain and Packed.fits(layer.table_VD):
            tables[id(layer.table)] = packed = Packed(kernels, layer.table_VD)
            layer.multiply = packed.multiply
            _let_go(layer.table)
            count += 1
    for layer in model.modules():
        if isinstance(layer, Embedding) and id(layer) in tables:
            layer.rows = tables[id(layer)].rows
    return count


def _let_go(layer: nn.Module) -> None:
    set_parameter(layer, "weight", layer.get_parameter("weight").to("meta"))
