"""fp8 on GPUs: e4m3 weights, e4m3 activations with dynamic scales per token.

Knows one weight, its scales, and which GEMM multiplies: torch's scaled one, or Quire's kernels
(`ops/triton/fp8_gemm.py` decides). No calibration: each token's activations determine their scale, or one per group.

    y = bias + scale_w * scale_x * sum (x_q * w_q),    x_q = e4m3(448 x / max |x|),    w_q likewise, or as stored

Shape suffixes: T tokens, I inputs, O outputs, G groups of inputs, R groups of outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from quire.layers.prepared_weight import PreparedWeight
from quire.logging import get_logger
from quire.ops.cpu.bindings import Kernels
from quire.ops.dispatch import runs_triton
from quire.quantization.int8 import by_rows

log = get_logger(__name__)

E4M3 = torch.float8_e4m3fn
MOST = 448.0
NEAR = 0.02  # relative error that `torch_can` allows
MAX_FLOATS = 1 << 24  # weights that are float32 at a time while loading
WIDTHS = (32, 64, 128, 256)  # inputs per group that the kernels support


def quantize(x_TI: Tensor, wide: int = 0) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [T, I], float32 scales [T], or [T, G] for groups of `wide` inputs): the definition."""
    rows, size = x_TI.shape
    padding = -size % wide if wide else 0
    groups = torch.nn.functional.pad(x_TI.float(), (0, padding)).view(rows, -1, wide or size)
    top = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(top > 1e-30, torch.full_like(top, MOST) / top.clamp(min=1e-30), 0.0)
    codes = (groups * factor).clamp_(-MOST, MOST).to(E4M3).view(rows, -1)[:, :size].contiguous()
    scale = (top / MOST)[..., 0]
    return codes, scale if wide else scale[:, 0]


class Float8Weight(PreparedWeight):
    """A weight that is q_OI times its scale.

    Args:
        q_OI: e4m3.
        scale: float32 [O]; or [R, G], one for each block of `high` outputs and `wide` inputs.
    """

    def __init__(self, q_OI: Tensor, scale: Tensor, gated: bool, wide: int = 0, high: int = 1):
        outs, ins = q_OI.shape
        super().__init__(outs, ins, gated, None)
        self.q_OI, self.scale = q_OI.contiguous(), scale.float().contiguous()
        self.wide, self.high = wide, high

    @classmethod
    def of(cls, weight_OI: Tensor, gated: bool, kernels: Kernels | None = None) -> PreparedWeight:
        """Quantize a weight of any float dtype, with one scale per output."""
        return cls(*by_rows(quantize, weight_OI, E4M3, MAX_FLOATS), gated)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        x_TI = x_TI.reshape(-1, self.ins)
        if not runs_triton(x_TI):
            return self.reference(x_TI, bias_O)
        from quire.ops.triton import fp8_gemm

        shape = (len(x_TI), self.outs, self.ins, x_TI.dtype, self.wide)
        coded = fp8_gemm.codes(x_TI, self.wide)
        if fp8_gemm.by_torch(*shape) and torch_can(x_TI.device):
            y_TO = scaled_product(coded, (self.q_OI, self.scale), bias_O, x_TI.dtype)
        else:
            weight = (self.q_OI, self.scale)
            y_TO = fp8_gemm.product(coded, weight, bias_O, x_TI.dtype, self.wide, self.high)
        return self.activated(y_TO)

    def reference(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The definition. Factors have 4 significant bits, so their products sum exactly in float64."""
        x_q, scale_x = quantize(x_TI, self.wide)
        if self.wide:
            scale_w = self.scale.repeat_interleave(self.high, 0)[: self.outs]
            parts = zip(x_q.split(self.wide, 1), self.q_OI.split(self.wide, 1), strict=True)
            y = torch.zeros(len(x_q), self.outs, device=x_q.device)
            for g, (x_part, w_part) in enumerate(parts):
                sums = (x_part.double() @ w_part.double().T).float()
                y += sums * (scale_x[:, g, None] * scale_w[:, g])
        else:
            sums = (x_q.double() @ self.q_OI.double().T).float()
            y = sums * (scale_x[:, None] * self.scale)
        return self.rounded(y, bias_O, x_TI.dtype)

    def floats(self) -> Tensor:
        """The dequantized weight, float32 [O, I]."""
        if not self.wide:
            return self.q_OI.float() * self.scale[:, None]
        by_row = self.scale.repeat_interleave(self.high, 0)[: self.outs]
        return self.q_OI.float() * by_row.repeat_interleave(self.wide, 1)[:, : self.ins]


def scaled_product(
    x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Torch's scaled GEMM, with one scale per token and one per output."""
    (x_TI, x_scale_T), (w_OI, w_scale_O) = x, w
    y_TO: Tensor = torch._scaled_mm(
        x_TI, w_OI.t(), scale_a=x_scale_T[:, None], scale_b=w_scale_O[None, :], bias=bias_O,
        out_dtype=dtype,
    )  # fmt: skip
    return y_TO


@functools.cache
def torch_can(device: torch.device) -> bool:
    """Whether torch's scaled GEMM runs on the device and is right: tried once, because GPUs and builds differ."""
    generator = torch.Generator().manual_seed(0)
    weight: Any = Float8Weight.of(torch.randn(256, 512, generator=generator).to(device), False)
    x_TI = torch.randn(128, 512, generator=generator).to(device).bfloat16()
    want = weight.reference(x_TI, None).float()
    try:
        pair = (weight.q_OI, weight.scale)
        bias = torch.zeros(256, dtype=x_TI.dtype, device=device)
        got = scaled_product(quantize(x_TI), pair, bias, x_TI.dtype).float()
    except Exception as error:
        log.info("8-bit floats use only Quire's kernels: %s", error)
        return False
    difference = float((got - want).norm() / want.norm())
    if not difference < NEAR:
        log.warning(
            "torch's scaled matrix product has an error of %.2g on this device, so it is not used",
            difference,
        )
    return difference < NEAR
