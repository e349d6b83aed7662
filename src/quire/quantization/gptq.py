"""GPTQ checkpoints: 2, 3, 4 or 8 bits in groups, inputs packed into 32-bit words, the group of each input in `g_idx`.

Knows their tensors. The first version of the format stores zero points less one, modulo 2 ** bits; the second stores
them as they are.

Shape suffixes: I inputs, O outputs, G groups.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from quire.layers.checkpoint_tensor import CheckpointTensor
from quire.layers.weights import Converted, WeightRef
from quire.quantization.checkpoint_format import QuantizedFormat, optional_tensor, zero_points
from quire.quantization.group_quant import dense


class GptqFormat(QuantizedFormat):
    """qweight [I / n, O], qzeros [G, O / n], scales [G, O], g_idx [I]; n fields of `bits` bits per word."""

    def stored(self, num_in: int, num_out: int, dtype: torch.dtype) -> dict[str, CheckpointTensor]:
        per = Fraction(32, self.scheme.bits)
        group = self.scheme.group if self.scheme.group > 0 else num_in
        groups = -(-num_in // group)
        return {
            "qweight": CheckpointTensor((-(-num_in // per), num_out), torch.int32, dim=1),
            "qzeros": CheckpointTensor(
                (groups, -(-num_out // per)), torch.int32, dim=1, pack_factor=per
            ),
            "scales": CheckpointTensor((groups, num_out), torch.float32, dim=1),
            "g_idx": CheckpointTensor((num_in,), torch.int32, per_part=True, optional=True),
        }

    def convert(self, ref: WeightRef) -> Converted:
        bits = self.scheme.bits
        q_OI = dense(ref.tensor("qweight").T, bits)[:, : ref.num_in]
        zero_OG = zero_points(ref.tensor("qzeros").T, ref, bits)
        if self.scheme.shifted:
            zero_OG = (zero_OG + 1) & ((1 << bits) - 1)
        scale_OG = ref.tensor("scales").T
        groups_PI = optional_tensor(ref, "g_idx")
        return self.grouped(ref, q_OI, scale_OG, zero_OG, bits, groups_PI)
