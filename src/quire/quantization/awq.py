"""AWQ checkpoints in the GEMM layout: 4 bits in groups, outputs packed into 32-bit words in an interleaved order.

Knows its tensors. Shape suffixes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.weights import Converted, WeightRef
from quire.quantization.checkpoint_format import QuantizedFormat
from quire.quantization.group_quant import fields

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field PLACES[i] of a word holds output i of eight."""


class AwqFormat(QuantizedFormat):
    """qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]."""

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        groups = num_in // (self.scheme.group if self.scheme.group > 0 else num_in)
        return {
            "qweight": CheckpointTensor((num_in, num_out // 8), torch.int32, dim=1, pack_factor=8),
            "qzeros": CheckpointTensor((groups, num_out // 8), torch.int32, dim=1, pack_factor=8),
            "scales": CheckpointTensor((groups, num_out), torch.float32, dim=1),
        }

    def convert(self, ref: WeightRef) -> Converted:
        q_OI, zero_OG = (_outputs(ref.tensor(name)) for name in ("qweight", "qzeros"))
        scale_OG = ref.tensor("scales").T
        return self.grouped(ref, q_OI, scale_OG, zero_OG, 4)


def _outputs(words: Tensor) -> Tensor:
    """[N, O / 8] -> [O, N]."""
    return fields(words, 4)[..., PLACES].flatten(1).T.contiguous()
