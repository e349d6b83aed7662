"""`ops/lora.py` by the CPU kernels, in float32 and bfloat16; else plain torch.

Shape suffixes: as in `ops/lora.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops import lora as definitions
from quire.ops.cpu.bindings import best
from quire.ops.lora import LoraTable


@definitions.lora.on("native")
def _lora(x_TI: Tensor, y_TO: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
    kernels = best()
    fits = x_TI.dtype == y_TO.dtype and x_TI.dtype in (torch.bfloat16, torch.float32)
    plain = x_TI.dim() == y_TO.dim() == 2 and x_TI.stride(1) == 1 and y_TO.stride(1) == 1
    if kernels is None or not fits or not plain or not table.is_native:
        return definitions.lora.reference(x_TI, y_TO, numbers_T, table)
    if len(numbers_T) != len(x_TI):
        raise ValueError(f"{len(numbers_T)} tokens have adapters, but a layer has {len(x_TI)}")
    kernels.lora(
        x_TI.data_ptr(), x_TI.stride(0), y_TO.data_ptr(), y_TO.stride(0), x_TI.dtype == torch.bfloat16,
        numbers_T.data_ptr(), len(x_TI), table.address,
    )  # fmt: skip
    return y_TO
