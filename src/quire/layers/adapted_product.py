"""The product of a weight with the adapters of its tokens. Knows one weight; tokens without an adapter keep their bits.

Shape suffixes: T tokens, I inputs, O outputs, W width of the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops.lora import LoraTable, lora
from quire.ops.reference import linear

if TYPE_CHECKING:
    from quire.layers.weights import WeightRef


def adapted_product(ref: WeightRef, x_TI: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
    """y_TW; adapters are added before the activation. numbers_T: of the tokens' adapters; -1: none."""
    prepared = ref.prepared
    if prepared is None:
        y_TO = linear(x_TI, ref.weight, ref.bias)
    else:
        y_TO = prepared.before_activation().multiply(x_TI, ref.bias)
    y_TW = ref.after_product(lora(x_TI, y_TO, numbers_T, table))
    if prepared is not None and ref.after is not None:
        # The kernel's activation may have other bits; that of a gated product has the same.
        base_TW = prepared.multiply(x_TI, ref.bias)
        y_TW = torch.where((numbers_T >= 0)[:, None], y_TW, base_TW)
    return y_TW
