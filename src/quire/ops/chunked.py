"""The reference ops a few rows at a time, so that their temporaries stay in the CPU's cache.

Knows no arithmetic: the results are those of `reference.py`, bit for bit. Without chunks, a step of 2,048 tokens writes
its float32 temporaries to memory and reads them back, which costs several times the arithmetic.

Shape suffixes: as in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.ops import reference

ELEMENTS = 1 << 16  # per chunk: 256 KB in float32


def _pieces(x: Tensor) -> Iterator[slice]:
    rows = max(16, ELEMENTS * len(x) // max(1, x.numel()))
    return (slice(a, a + rows) for a in range(0, len(x), rows))


def _few(x: Tensor) -> bool:
    return x.numel() <= 2 * ELEMENTS


@reference.rms_norm.on("pieces")
def _rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    run = reference.rms_norm.reference
    if _few(x_TD):
        return run(x_TD, weight_D, eps, plus_one)
    y_TD = x_TD.new_empty(x_TD.shape)
    for at in _pieces(x_TD):
        y_TD[at] = run(x_TD[at], weight_D, eps, plus_one)
    return y_TD


@reference.add_rms_norm.on("pieces")
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Overwrites both inputs: x with the norm, the residual with the sum."""
    for at in _pieces(x_TD):
        total_TD = residual_TD[at].add_(x_TD[at])
        x_TD[at] = reference.rms_norm.reference(total_TD, weight_D, eps, plus_one)
    return x_TD, residual_TD


@reference.rotate.on("pieces")
def _rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool = False) -> Tensor:
    run = reference.rotate.reference
    if _few(x_THD):
        return run(x_THD, cos_TP, sin_TP, interleaved)
    y_THD = x_THD.new_empty(x_THD.shape)
    for at in _pieces(x_THD):
        y_THD[at] = run(x_THD[at], cos_TP[at], sin_TP[at], interleaved)
    return y_THD


@reference.silu_and_mul.on("pieces")
def _silu_and_mul(x_TI2: Tensor) -> Tensor:
    run = reference.silu_and_mul.reference
    if _few(x_TI2):
        return run(x_TI2)
    y_TI = x_TI2.new_empty(len(x_TI2), x_TI2.shape[1] // 2)
    for at in _pieces(x_TI2):
        y_TI[at] = run(x_TI2[at])
    return y_TI


@reference.gelu_and_mul.on("pieces")
def _gelu_and_mul(x_TI2: Tensor, tanh: bool = False) -> Tensor:
    run = reference.gelu_and_mul.reference
    if _few(x_TI2):
        return run(x_TI2, tanh)
    y_TI = x_TI2.new_empty(len(x_TI2), x_TI2.shape[1] // 2)
    for at in _pieces(x_TI2):
        y_TI[at] = run(x_TI2[at], tanh)
    return y_TI
