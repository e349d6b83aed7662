"""WNA16 on an accelerator: weights of 4 bits, or of 8 in groups, with 16-bit activations.

Knows one weight: integers in groups, from a checkpoint or from `int4`. 8 bits with one scale per output are
`int8.py`'s. `ops/triton/wna16_gemm.py` multiplies.

    y = bias + sum over groups of  scale_w * sum (x * (w_q - zero))

A CPU also quantizes activations, because it multiplies 8-bit integers faster (`int4.py`). On an accelerator, reading
the weights takes most of a step of few tokens, so smaller activations would save no time.

Shape suffixes: T tokens, I inputs, O outputs, G groups.
"""

from __future__ import annotations

from torch import Tensor

from quire.layers.prepared_weight import PreparedWeight
from quire.ops.cpu.bindings import Kernels
from quire.ops.experts import CodedWeight
from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import GROUP, group_for, quantize_groups
from quire.quantization.int8 import Int8Codes


class FewBitsWeight(PreparedWeight):
    """A packed weight of grouped integers.

    Args:
        grouped: its group size is a multiple of 32: see `takes`.
        bits: 4 or 8: bits per stored integer.
    """

    def __init__(self, grouped: Grouped, bits: int, gated: bool):
        from quire.ops.triton.wna16_gemm import packed, step_of

        outs, ins = grouped.q_OI.shape
        super().__init__(outs, ins, gated, None)
        self.bits, self.step = bits, step_of(grouped.group)
        self.data = packed(grouped.q_OI, bits, self.step)
        self.scale_GO = grouped.scale_OG.T.contiguous()
        self.zero_GO = grouped.zero_OG.T.contiguous()
        self.order_I = grouped.order_I

    @staticmethod
    def takes(group: int) -> bool:
        return group % 32 == 0

    @classmethod
    def int4(
        cls, weight_OI: Tensor, gated: bool, kernels: Kernels | None = None, group: int = GROUP
    ) -> PreparedWeight:
        """Quantize a weight of any float dtype, in groups of at most `group`; int8 if no size divides the inputs."""
        if not (group := group_for(weight_OI, group)):
            return Int8Codes.of(weight_OI, gated, None)
        return cls(quantize_groups(weight_OI, group), 4, gated)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        from quire.ops.triton import wna16_gemm
        from quire.ops.triton.launch import runs_on

        x_TI = x_TI.reshape(-1, self.ins)
        if not runs_on(x_TI):
            return self.reference(x_TI, bias_O)
        if self.order_I is not None:
            x_TI = x_TI.index_select(1, self.order_I)
        way = wna16_gemm.product if len(x_TI) <= wna16_gemm.MANY else wna16_gemm.by_library
        y_TO = way(x_TI, self.data, self.scale_GO, self.zero_GO, bias_O, self.step)
        return self.activated(y_TO)

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition, in float64."""
        y = x_TI.double() @ self.floats().double().T
        return self.rounded(y, bias_O, x_TI.dtype)

    def floats(self) -> Tensor:
        """The dequantized weight, float32 [O, I]."""
        from quire.ops.triton.wna16_gemm import unpacked

        q_OI = unpacked(self.data, self.bits, self.step)
        return Grouped(q_OI, self.scale_GO.T, self.zero_GO.T, self.order_I).dequantized()

    def coded(self) -> CodedWeight | None:
        if self.order_I is not None:
            return None
        return CodedWeight(self.data, self.scale_GO, self.zero_GO, self.bits, self.step)
