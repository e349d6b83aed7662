"""int4 on the CPU: weights in groups with a scale and a zero point each, activations dynamically int8 per group.

Knows one weight. Batch-invariant: the arithmetic is the same for every number of tokens. Integers sum exactly within a
group; groups are added in order.

    y = bias + sum over groups of  scale_w * scale_x * (sum (x_q * w_q) - zero * sum x_q)
    x_q = round(127 x / max |x of the group|),    w_q and zero: integers from 0 to 15

Shape suffixes: T tokens, I inputs, O outputs, G groups, S inputs of a group, P panels of 32 outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.layers.prepared_weight import PANEL, PreparedWeight, addresses
from quire.ops.cpu.bindings import Kernels
from quire.platforms.memory import empty_in_huge_pages
from quire.quantization.group_quant import Grouped
from quire.quantization.int8 import Int8Weight, quantize

MOST = 15
STEP = 32  # inputs of a group that the kernels process at once
GROUP = 128
MAX_FLOATS = 1 << 20  # weights that are quantized at a time, to keep temporaries small


def quantize_groups(weight_OI: Tensor, group: int) -> Grouped:
    """15 steps from the smallest to the largest weight of each group, in a range that includes 0."""
    rows = max(1, MAX_FLOATS // weight_OI.shape[1])
    found = [_quantize_rows(part.float(), group) for part in weight_OI.split(rows)]
    q_OI, scale_OG, zero_OG = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Grouped(q_OI, scale_OG, zero_OG)


def _quantize_rows(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w_OGS = weight_OI.unflatten(1, (-1, group))
    low_OG, high_OG = w_OGS.amin(2).clamp_(max=0), w_OGS.amax(2).clamp_(min=0)
    scale_OG = (high_OG - low_OG) / MOST
    scale_OG[scale_OG == 0] = 1
    zero_OG = (-low_OG / scale_OG).round_()
    q_OGS = (w_OGS / scale_OG[:, :, None]).round_().add_(zero_OG[:, :, None]).clamp_(0, MOST)
    return q_OGS.byte().flatten(1), scale_OG, zero_OG.byte()


def quantize_groups_by(kernels: Kernels | None, weight_OI: Tensor, group: int) -> Grouped:
    """`quantize_groups`, by the kernels where possible: the same numbers, many times faster."""
    if kernels is None or weight_OI.dtype != torch.bfloat16:
        return quantize_groups(weight_OI, group)
    weight_OI = weight_OI.contiguous()
    outs, ins = weight_OI.shape
    q_OI = torch.empty(outs, ins, dtype=torch.uint8)
    scale_OG, zero_OG = torch.empty(outs, ins // group), q_OI.new_empty(outs, ins // group)
    kernels.quantize_groups(
        weight_OI.data_ptr(), outs, ins, group, q_OI.data_ptr(), scale_OG.data_ptr(), zero_OG.data_ptr()
    )  # fmt: skip
    return Grouped(q_OI, scale_OG, zero_OG)


def group_for(weight_OI: Tensor, most: int) -> int:
    """The largest size of a group, up to `most`, that divides the inputs; 0: none does."""
    sizes = (size for size in (128, 64, 32) if size <= most)
    return next((size for size in sizes if weight_OI.shape[1] % size == 0), 0)


class Int4Weight(PreparedWeight):
    """Multiplied by the kernels where they run and activations are bf16, else in plain torch with the same integers.

    `codes`: the integer that each of the 16 stands for, up to 255 (codebooks.py); None: itself.
    """

    def __init__(
        self, grouped: Grouped, gated: bool, kernels: Kernels | None, codes: Tensor | None = None
    ):
        outs, ins = grouped.q_OI.shape
        if not self.fits(outs, ins, gated, STEP) or grouped.group % STEP:
            kernels = None
        super().__init__(outs, ins, gated, kernels)
        self.group, self.order_I, self.codes = grouped.group, grouped.order_I, codes
        if kernels is None:
            self.q_OI, self.scale_OG, self.zero_OG = grouped.q_OI, grouped.scale_OG, grouped.zero_OG
            return
        self.data = self._panels(grouped.q_OI)
        self.scale_PGO = self._by_panel(grouped.scale_OG)
        self.zero_PGO = self._by_panel(grouped.zero_OG)

    @classmethod
    def of(
        cls, weight_OI: Tensor, gated: bool, kernels: Kernels | None, group: int = GROUP
    ) -> PreparedWeight:
        """Quantize a weight of any float dtype, in groups of at most `group`; int8 if no size divides the inputs."""
        if not (group := group_for(weight_OI, group)):
            return Int8Weight.of(weight_OI, gated, kernels)
        return cls(quantize_groups_by(kernels, weight_OI, group), gated, kernels)

    @classmethod
    def unfilled(cls, outs: int, ins: int, gated: bool, kernels: Kernels, group: int) -> Int4Weight:
        """A weight whose numbers the kernels will write."""
        made = cls.__new__(cls)
        PreparedWeight.__init__(made, outs, ins, gated, kernels)
        made.group, made.order_I, made.codes = group, None, None
        panels = made.padded // PANEL
        made.data = empty_in_huge_pages((panels, ins // 4, 16, 4), torch.uint8)
        made.scale_PGO = torch.zeros(panels, ins // group, PANEL)
        made.zero_PGO = torch.zeros(panels, ins // group, PANEL, dtype=torch.uint8)
        return made

    def run(self, kernels: Kernels, x_TI: Tensor, bias: int | None, y_TW: Tensor) -> None:
        kernels.linear_int4(
            x_TI.data_ptr(), x_TI.stride(0), self.data.data_ptr(), self.scale_PGO.data_ptr(), self.zero_PGO.data_ptr(),
            *addresses(codes=self.codes, order=self.order_I).values(), bias, y_TW.data_ptr(), y_TW.shape[1], len(x_TI),
            self.padded, self.ins, self.group, self.kernel_act,
        )  # fmt: skip

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition."""
        group, q_OI = self.group, self.q_OI if self.codes is None else self.codes[self.q_OI.int()]
        x_TI = x_TI if self.order_I is None else x_TI[:, self.order_I.long()]
        y_TO = torch.zeros(len(x_TI), self.outs)
        for g in range(self.ins // group):
            group_slice = slice(g * group, (g + 1) * group)
            x_TS, scale_T = quantize(x_TI[:, group_slice])
            x_TS = x_TS.double()
            sums = x_TS @ q_OI[:, group_slice].double().T
            sums -= x_TS.sum(1, keepdim=True) * self.zero_OG[:, g].double()
            y_TO += sums.float() * (scale_T[:, None] * self.scale_OG[:, g])
        return self.rounded(y_TO, bias_O, x_TI.dtype)

    def kernel_args(self) -> dict[str, Any]:
        scale, zero = self.scale_PGO, self.zero_PGO
        found = addresses(
            data=self.data, scale=scale, zero=zero, codes=self.codes, order=self.order_I
        )
        return {**found, "group": self.group}

    def _panels(self, q_OI: Tensor) -> Tensor:
        """[P, I / 4, 16, 4] bytes, 4 consecutive inputs innermost: low bits output o of a panel, high bits o + 16."""
        whole = self._in_panels(q_OI).view(-1, 2, 16, self.ins // 4, 4)
        low, high = whole[:, 0], whole[:, 1]
        packed = (low | high << 4).permute(0, 2, 1, 3)
        return empty_in_huge_pages(tuple(packed.shape), torch.uint8).copy_(packed)

    def _by_panel(self, value_OG: Tensor) -> Tensor:
        return self._in_panels(value_OG).transpose(1, 2).contiguous()

    def _in_panels(self, value_ON: Tensor) -> Tensor:
        """[P, 32, N]; a panel of a gated weight has 16 outputs from each half."""
        if self.gated:
            parts = value_ON.unflatten(0, (2, -1, 16))
            return parts.transpose(0, 1).reshape(-1, PANEL, value_ON.shape[1])
        value_ON = F.pad(value_ON, (0, 0, 0, self.padded - self.outs))
        return value_ON.unflatten(0, (-1, PANEL))
