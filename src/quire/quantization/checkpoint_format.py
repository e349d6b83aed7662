"""Formats of quantized checkpoints: a layer has the checkpoint's tensors until all are loaded, then a prepared weight.

Knows which weight to make of grouped integers. Does not know the tensors of any format (gptq.py, awq.py, ...).

Shape suffixes: I inputs, O outputs, G groups, P parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.checkpoint_quantization import QuantizationScheme
from quire.layers.prepared_weight import PreparedWeight
from quire.layers.weights import CheckpointFormat, WeightRef
from quire.logging import get_logger
from quire.ops.cpu.bindings import Kernels, best
from quire.quantization.group_quant import dense, in_order, scattered
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from quire.quantization.wna16 import FewBitsWeight

log = get_logger(__name__)

Make = Callable[[Tensor, bool, Kernels | None], PreparedWeight]


class QuantizedFormat(CheckpointFormat):
    """A format of quantized weights. A subclass lists its tensors (`stored`) and converts them.

    Args:
        make: quantizes floats, for a format that is not multiplied as it is.
        accelerator: the model runs on an accelerator.
    """

    def __init__(
        self, scheme: QuantizationScheme, make: Make = Int8Weight.of, accelerator: bool = False
    ):
        self.scheme, self.make, self.accelerator = scheme, make, accelerator

    def kernels(self, ref: WeightRef) -> Kernels | None:
        """The CPU kernels; None on an accelerator, because loading them may compile them."""
        return None if self.accelerator else kernels_for(ref.dtype)

    def grouped(
        self,
        ref: WeightRef,
        q_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        bits: int,
        groups_PI: Tensor | None = None,
    ) -> PreparedWeight | Tensor:
        """A weight of grouped integers.

        On a CPU, weights of up to 4 bits stay grouped; weights of 8 bits become int8 with one scale per output, exactly
        so if there is one group and all zero points are 128. On an accelerator all stay grouped.

        `groups_PI`: the group of each input, for each part of the weight; None: contiguous groups of one size.
        """
        found = None
        if groups_PI is None or bool((groups_PI == groups_PI[0]).all()):
            found = in_order(q_OI, scale_OG, zero_OG, None if groups_PI is None else groups_PI[0])
        kernels = self.kernels(ref)
        if found is None or (self.accelerator and not FewBitsWeight.takes(found.group)):
            why = "weights of %d parts are dequantized before multiplying, because their groups differ"
            log.warning(why, len(ref.outputs))
            return dequantized_groups(ref, q_OI, scale_OG, zero_OG, groups_PI)
        if self.accelerator:
            return FewBitsWeight(found, 4 if bits <= 4 else 8, ref.gated)
        if bits <= 4:
            return Int4Weight(found.finer(), ref.gated, kernels)
        if found.scale_OG.shape[1] == 1 and (bits < 8 or bool((found.zero_OG == 128).all())):
            q_OI = (found.q_OI.short() - found.zero_OG.short()).to(torch.int8)
            return Int8Weight(q_OI, found.scale_OG[:, 0].contiguous(), ref.gated, kernels)
        return Int8Weight.of(found.dequantized(), ref.gated, kernels)


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The CPU kernels if they take activations of this dtype: they take bfloat16."""
    return best() if dtype == torch.bfloat16 else None


def dequantized_groups(
    ref: WeightRef, q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, groups_PI: Tensor | None
) -> Tensor:
    """The weight that grouped integers are, [O, I]. `groups_PI`: as of `QuantizedFormat.grouped`."""
    ins, groups = q_OI.shape[1], scale_OG.shape[1]
    if groups_PI is None:
        groups_PI = (torch.arange(ins, device=q_OI.device) // -(-ins // groups)).expand(
            len(ref.outputs), -1
        )
    split = (tensor.split(ref.outputs) for tensor in (q_OI, scale_OG, zero_OG))
    parts = [scattered(*part) for part in zip(*split, groups_PI, strict=True)]
    return torch.cat(parts)


def optional_tensor(ref: WeightRef, name: str) -> Tensor | None:
    """The tensor; None if the checkpoint lacks it."""
    tensor = ref.tensor(name)
    return None if tensor.is_meta else tensor


def by_output(each: Tensor, ref: WeightRef) -> Tensor:
    """One value per part -> one per output."""
    return each.flatten().repeat_interleave(torch.tensor(ref.outputs, device=each.device))


def zero_points(words_NG: Tensor, ref: WeightRef, bits: int) -> Tensor:
    """Zero points that are packed along the outputs -> [O, G]. Each part of the weight starts a new word."""
    parts, start = [], 0
    for width in ref.outputs:
        rows = -(-width * bits // 32)
        parts.append(dense(words_NG[start : start + rows].T, bits).T[:width])
        start += rows
    return torch.cat(parts)
