"""Which scheme a name asks for, and a whole model made to it, weight by weight.

Knows models that are filled. Does not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from quire.layers.embedding import Embedding, Head
from quire.layers.linear import PLAIN, Linear
from quire.ops.cpu.library import Kernels, best
from quire.quantization.base import Weight, let_go, settle
from quire.quantization.int8 import Int8Weight
from quire.quantization.packed import Packed

Make = Callable[[Tensor, bool, Kernels | None], Weight]

ONLINE: dict[str, Make] = {"int8": Int8Weight.of}
"""`--quantization` -> how a weight of 16 or 32 bits becomes one of the scheme."""


def quantize_model(model: nn.Module, name: str) -> int:
    """Make every plain linear and the head as `name` says, one after the other; how many.

    The embedding's table stays as it is.
    """
    make, kernels, count = ONLINE[name], best(), 0
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.scheme is PLAIN:
            settle(layer, make(layer.weight, layer.silu, kernels))
            count += 1
        elif isinstance(layer, Head) and layer.plain:
            weight = make(layer.table_VD, False, kernels)
            layer.multiply = weight.multiply
            if layer.table is layer:
                let_go(layer, weight.outs, weight.ins)
            count += 1
    return count


def pack_model(model: nn.Module) -> int:
    """Repack what is still plain and fits, so that at most one weight exists twice; how many were."""
    kernels = best()
    if kernels is None:
        return 0
    count = 0
    tables: dict[int, Packed] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.scheme is PLAIN:
            if Packed.takes(layer.weight, layer.silu):
                settle(layer, Packed(kernels, layer.weight, layer.silu))
                count += 1
        elif isinstance(layer, Head) and layer.plain and Packed.takes(layer.table_VD):
            tables[id(layer.table)] = packed = Packed(kernels, layer.table_VD)
            layer.multiply = packed.multiply
            let_go(layer.table, packed.outs, packed.ins)
            count += 1
    for layer in model.modules():
        if isinstance(layer, Embedding) and id(layer) in tables:
            layer.rows = tables[id(layer)].rows
    return count
