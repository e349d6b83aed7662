"""Quantizes loaded weights of 16 bits on a CPU: many by one call of the kernels, straight from the mapped files.

Knows which panels the rows of a weight fill. The result is the same as of `Int8Weight.of` and `Int4Weight.of`, to the bit.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.layers.prepared_weight import PANEL
from quire.layers.weights import WeightRef
from quire.ops.cpu.bindings import Kernels
from quire.quantization.int4 import STEP, Int4Weight, group_for
from quire.quantization.int8 import STEP as INT8_STEP
from quire.quantization.int8 import Int8Weight
from quire.quantization.packing import Packing

HALF = PANEL // 2


class Rows(NamedTuple):
    """Rows that fill whole panels: the tensors with the first and the second half of each panel, and the first output."""

    low_OI: Tensor
    high_OI: Tensor
    first: int


def quantize_later(ref: WeightRef, packing: Packing, kernels: Kernels, most: int) -> bool:
    """Replace a loaded weight by a quantized one, which is complete after `packing.finish`; False: it stays as it is.

    `most`: inputs of a group of int4, at most; 0: int8.
    """
    outs, ins, gated = ref.num_out, ref.num_in, ref.gated
    if ref.weight.dtype != torch.bfloat16:
        return False
    group = group_for(ref.weight, most) if most else 0
    if not Int8Weight.fits(outs, ins, gated, STEP if group else INT8_STEP):
        return False
    made: Int8Weight | Int4Weight
    if group:
        made = Int4Weight.unfilled(outs, ins, gated, kernels, group)
        scale, other, width = made.scale_PGO, made.zero_PGO, HALF * ins
    else:
        made = Int8Weight.unfilled(outs, ins, gated, kernels)
        scale, other, width = made.scale_O, made.sum_O, PANEL * ins
    for low_OI, high_OI, first in _rows(ref):
        panel, step = first // PANEL, low_OI.stride(0) * low_OI.itemsize
        high = high_OI.data_ptr() if gated else low_OI.data_ptr() + HALF * step
        key = panel if group else first
        packing.add(
            [
                *(low_OI.data_ptr(), high, len(low_OI), len(high_OI), step, HALF if gated else PANEL),
                *(made.data.data_ptr() + panel * width, -(-len(low_OI) // (HALF if gated else PANEL)), ins, group),
                *(scale.data_ptr() + key * scale.stride(0) * scale.itemsize, other.data_ptr() + key * other.stride(0) * other.itemsize),
                outs // 2 if gated else HALF,
            ],
            *((low_OI, high_OI) if gated else (low_OI,)),
        )  # fmt: skip
    ref.install(made)
    return True


def _rows(ref: WeightRef) -> list[Rows]:
    """The rows of a weight, in the tensors of the files if these fill whole panels."""
    pieces, half = ref.pieces("weight"), ref.num_out // 2
    firsts = [first for first, _ in pieces]
    usable = (
        len(firsts) < 3 and firsts[-1] in (0, half)
        if ref.gated
        else not any(first % PANEL for first in firsts)
    )
    if (
        not usable
        or len({rows_OI.stride(0) for _, rows_OI in pieces}) > 1
        or any(rows_OI.stride(1) != 1 for _, rows_OI in pieces)
    ):
        whole_OI = torch.empty(ref.num_out, ref.num_in, dtype=torch.bfloat16)
        for first, rows_OI in pieces:
            whole_OI[first : first + len(rows_OI)] = rows_OI
        pieces = [(0, whole_OI)]
    if ref.gated:
        low_OI, high_OI = (
            pieces[0][1].split(half) if len(pieces) == 1 else (pieces[0][1], pieces[1][1])
        )
        return [Rows(low_OI, high_OI, 0)]
    return [Rows(rows_OI, rows_OI[HALF:], first) for first, rows_OI in pieces]
