"""Every op in plain torch: the definition that tests compare kernels with.

Knows arithmetic. Does not know layers, batches or devices. On the CPU, the float32 results are batch-invariant (see
`linear`): the text of a request does not depend on the other requests of its steps.

Shape suffixes: T tokens, D features, I inner features, H heads, R rotated features in P = R / 2 pairs,
N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.dispatch import op

MIN_ROWS = 16
PIECE = 1 << 15
OAI_LIMIT, OAI_ALPHA = 7.0, 1.702


@op
def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x times weight transposed, plus bias.

    In float32 on the CPU it pads to 16 rows: MKL sums in another order for fewer rows, and in one order from 16 on
    (measured; with several threads only in the mode that `platforms/cpu.py` sets). It also pads a single output to two.
    """
    rows = x_TD.shape[0]
    if x_TD.dtype != torch.float32 or x_TD.is_cuda:
        return F.linear(x_TD, weight_ND, bias_N)
    if len(weight_ND) == 1 and bias_N is None:
        return linear.reference(x_TD, F.pad(weight_ND, (0, 0, 0, 1)))[:, :1]
    if rows >= MIN_ROWS:
        return F.linear(x_TD, weight_ND, bias_N)
    return F.linear(F.pad(x_TD, (0, 0, 0, MIN_ROWS - rows)), weight_ND, bias_N)[:rows]


def sigmoid(x_TD: Tensor) -> Tensor:
    """sigmoid, in float32, with the same bits for a row alone: `Tensor.sigmoid` computes the end of a tensor otherwise."""
    x_TD = x_TD.float()
    return torch.stack((x_TD, torch.zeros_like(x_TD)), -1).softmax(-1)[..., 0]


@op
def multiply_sigmoid(x_TD: Tensor, gate_THD: Tensor) -> Tensor:
    """x times the sigmoid of the gates, which is rounded before. Implementations may overwrite x."""
    return x_TD * sigmoid(gate_THD).to(x_TD.dtype).flatten(-2)


@op
def rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    """x scaled to unit mean square over D, in float32, times weight (Llama: after rounding to x's dtype).

    plus_one: weights are stored around zero; multiply by 1 + weight, in float32 (Gemma). D may be the last of any
    number of dimensions.
    """
    y = F.rms_norm(x_TD.float(), x_TD.shape[-1:], eps=eps)
    if weight_D is None:
        return y.to(x_TD.dtype)
    if plus_one:
        return (y * (1 + weight_D.float())).to(x_TD.dtype)
    return y.to(x_TD.dtype) * weight_D


@op
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """The normed sum, and the sum. Implementations may overwrite their inputs."""
    total_TD = residual_TD + x_TD
    return rms_norm.reference(total_TD, weight_D, eps, plus_one), total_TD


@op
def layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float, bias_D: Tensor | None = None) -> Tensor:
    """x minus its mean, scaled to unit variance over D, times weight, plus bias, in float32.

    The weight may have more dimensions than one.
    """
    y_TD = F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=eps) * weight_D.float()
    y_TD = y_TD if bias_D is None else y_TD + bias_D.float()
    return y_TD.to(x_TD.dtype)


@op
def scale_logits(logits_SV: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits times scale, then softcap * tanh(logits / softcap), in float32. Implementations may overwrite their input."""
    if softcap is None:
        return logits_SV * scale
    y_SV = softcap * (logits_SV.float() * (scale / softcap)).tanh()
    return y_SV.to(logits_SV.dtype)


@op
def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of features by their angles; cos and sin: float32, one value per pair.

    Pairs are (i, i + R / 2) of the first R features, or (2 i, 2 i + 1) when interleaved; features from R on
    pass unchanged.
    """
    half = cos_TP.shape[1]
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    x = x_THD[..., : 2 * half].float()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    y = y.to(x_THD.dtype)
    return y if 2 * half == x_THD.shape[-1] else torch.cat((y, x_THD[..., 2 * half :]), -1)


@op
def silu_and_mul(x_TI2: Tensor) -> Tensor:
    """silu(first half) times second half."""
    gate, up = x_TI2.chunk(2, -1)
    return F.silu(gate) * up


@op
def gelu_and_mul(x_TI2: Tensor, tanh: bool = False) -> Tensor:
    """gelu(first half) times second half; tanh: the approximation."""
    gate, up = x_TI2.chunk(2, -1)
    if tanh:
        return F.gelu(gate, approximate="tanh") * up
    # Torch's routine for contiguous inputs gives other bits, and a single row is always contiguous.
    return F.gelu(gate.contiguous()) * up


def act_and_mul(x_TI2: Tensor, act: str) -> Tensor:
    """The activation of the first half times the second half.

    act: "silu", "gelu", "gelu_pytorch_tanh" or "clamped_swiglu" (gpt-oss): the gate is at most 7, the other half from -7 to 7,
    and gate * sigmoid(1.702 * gate) * (other + 1).
    """
    if act == "silu":
        return silu_and_mul(x_TI2)
    if act == "clamped_swiglu":
        gate, up = x_TI2.chunk(2, -1)
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
        return (up + 1) * (gate * (gate * OAI_ALPHA).sigmoid())
    return gelu_and_mul(x_TI2, act == "gelu_pytorch_tanh")


UNGATED = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu")
"""The activations that `activate` knows."""


def quick_gelu(x_TI: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), in float32."""
    return (x_TI.float() * (x_TI.float() * OAI_ALPHA).sigmoid()).to(x_TI.dtype)


@op
def activate(x_TI: Tensor, act: str) -> Tensor:
    """The activation of each value; act: one of `UNGATED`.

    On the CPU it computes PIECE values at a time: torch computes the last few of a call, and of a thread's share of a larger
    call, by another routine with other bits.
    """
    if act == "relu":
        return x_TI.relu()
    tanh = "tanh" if act == "gelu_pytorch_tanh" else "none"
    run: Callable[[Tensor], Tensor] = functools.partial(F.gelu, approximate=tanh)
    if act in ("silu", "quick_gelu"):
        run = F.silu if act == "silu" else quick_gelu
    if x_TI.device.type != "cpu":
        return run(x_TI)
    flat = F.pad(x_TI.flatten(), (0, -x_TI.numel() % 64))
    return torch.cat([run(part) for part in flat.split(PIECE)])[: x_TI.numel()].view_as(x_TI)


@op
def embedding(ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of a table."""
    return F.embedding(ids_T, weight_VD)
