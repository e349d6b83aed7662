"""Checkpoint schemes: a linear layer has the checkpoint's tensors until all are loaded, then a prepared weight.

Knows which weight to make of grouped integers. Does not know the tensors of any scheme (gptq.py, awq.py, ...).

Shape suffixes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config.quantization import WeightLayout
from quire.layers.linear import UNQUANTIZED, Linear, StoredTensor, UnquantizedLinearMethod
from quire.layers.weight_slots import set_parameter
from quire.logging import get_logger
from quire.ops.cpu.bindings import Kernels, best
from quire.quantization.base import Weight, install_weight
from quire.quantization.group_quant import in_order, scattered
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from quire.quantization.wna16 import FewBitsWeight

log = get_logger(__name__)

Make = Callable[[Tensor, bool, Kernels | None], Weight]


class CheckpointLinearMethod(UnquantizedLinearMethod):
    """The method of a layer while the checkpoint is loaded. A subclass lists its tensors (`stored`) and converts them.

    `apart`: the model runs on an accelerator.
    """

    def __init__(self, layout: WeightLayout, make: Make = Int8Weight.of, apart: bool = False):
        self.layout, self.make, self.apart = layout, make, apart

    def kernels(self, layer: Linear) -> Kernels | None:
        """The CPU kernels; None on an accelerator, because loading them may compile them."""
        return None if self.apart else kernels_for(layer.dtype)

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, StoredTensor]:
        raise NotImplementedError

    def convert(self, layer: Linear) -> None:
        """Install the final quantization method."""
        raise NotImplementedError

    def after_load(self, layer: Linear) -> None:
        self.convert(layer)


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The CPU kernels if they take activations of this dtype: they take bfloat16."""
    return best() if dtype == torch.bfloat16 else None


def become_grouped(
    layer: Linear,
    q_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor,
    bits: int,
    groups_PI: Tensor | None = None,
    apart: bool = False,
) -> None:
    """Install a weight for grouped integers.

    On a CPU, weights of up to 4 bits stay grouped; weights of 8 bits become int8 with one scale per output, exactly so
    if there is one group and all zero points are 128. On an accelerator all stay grouped.

    `groups_PI`: the group of each input, for each part of the layer; None: contiguous groups of one size.
    """
    found = None
    if groups_PI is None or bool((groups_PI == groups_PI[0]).all()):
        found = in_order(q_OI, scale_OG, zero_OG, None if groups_PI is None else groups_PI[0])
    kernels = None if apart else kernels_for(layer.dtype)
    if found is None or (apart and not FewBitsWeight.takes(found.group)):
        _become_plain(layer, q_OI, scale_OG, zero_OG, groups_PI)
    elif apart:
        install_weight(layer, FewBitsWeight(found, 4 if bits <= 4 else 8, layer.silu))
    elif bits <= 4:
        install_weight(layer, Int4Weight(found.finer(), layer.silu, kernels))
    elif found.scale_OG.shape[1] == 1 and bool((found.zero_OG == 128).all()):
        q_OI = (q_OI.short() - 128).to(torch.int8)
        install_weight(
            layer, Int8Weight(q_OI, found.scale_OG[:, 0].contiguous(), layer.silu, kernels)
        )
    else:
        install_weight(layer, Int8Weight.of(found.dequantized(), layer.silu, kernels))


def _become_plain(
    layer: Linear, q_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, groups_PI: Tensor | None
) -> None:
    """Dequantize: parts with different input orders or groups of different sizes are rare, and multiplied as floats."""
    ins, groups = q_OI.shape[1], scale_OG.shape[1]
    if groups_PI is None:
        groups_PI = (torch.arange(ins, device=q_OI.device) // -(-ins // groups)).expand(
            len(layer.outputs), -1
        )
    split = (tensor.split(layer.outputs) for tensor in (q_OI, scale_OG, zero_OG))
    parts = [scattered(*part) for part in zip(*split, groups_PI, strict=True)]
    log.warning(
        "weights of %s parts are multiplied as floats: their groups do not agree", len(parts)
    )
    for name in [n for n in layer._parameters if n != "bias"]:
        delattr(layer, name)
    set_parameter(layer, "weight", torch.cat(parts).to(layer.dtype))
    layer.quant_method = UNQUANTIZED


def optional_tensor(layer: Linear, name: str) -> Tensor | None:
    """The tensor; None if the checkpoint lacks it."""
    tensor = layer._parameters.get(name)
    return None if tensor is None or tensor.is_meta else tensor.data


def by_output(each: Tensor, layer: Linear) -> Tensor:
    """One value per part -> one per output."""
    return each.flatten().repeat_interleave(torch.tensor(layer.outputs, device=each.device))
