"""The reference ops a few rows at a time, so that their temporaries stay in the CPU's cache.

Knows no arithmetic: the results are those of `reference.py`, bit for bit. Without chunks, a step of 2,048 tokens writes
its float32 temporaries to memory and reads them back, which costs several times the arithmetic.

Shape suffixes: as in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from quire.ops import reference

ELEMENTS = 1 << 16  # per chunk: 256 KB in float32


def _chunks(x: Tensor) -> Iterator[slice]:
    rows = max(16, ELEMENTS * len(x) // max(1, x.numel()))
    return (slice(a, a + rows) for a in range(0, len(x), rows))


def _by_chunks(run: Callable[..., Tensor], *by_row: Tensor) -> Tensor:
    """`run` of tensors with a row for each token; the first one's size decides about the chunks."""
    if by_row[0].numel() <= 2 * ELEMENTS:
        return run(*by_row)
    parts = ((at, run(*(tensor[at] for tensor in by_row))) for at in _chunks(by_row[0]))
    at, part = next(parts)
    found = part.new_empty((len(by_row[0]), *part.shape[1:]))
    found[at] = part
    for at, part in parts:
        found[at] = part
    return found


@reference.rms_norm.on("chunked")
def rms_norm(x_TD: Tensor, weight_D: Tensor | None, eps: float, plus_one: bool = False) -> Tensor:
    return _by_chunks(lambda x: reference.rms_norm.reference(x, weight_D, eps, plus_one), x_TD)


@reference.add_rms_norm.on("chunked")
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Overwrites both inputs: x with the norm, the residual with the sum."""
    for at in _chunks(x_TD):
        total_TD = residual_TD[at].add_(x_TD[at])
        x_TD[at] = reference.rms_norm.reference(total_TD, weight_D, eps, plus_one)
    return x_TD, residual_TD


@reference.rotate.on("chunked")
def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor, interleaved: bool = False) -> Tensor:
    run = reference.rotate.reference
    return _by_chunks(lambda x, cos, sin: run(x, cos, sin, interleaved), x_THD, cos_TP, sin_TP)


@reference.silu_and_mul.on("chunked")
def silu_and_mul(x_TI2: Tensor) -> Tensor:
    return _by_chunks(reference.silu_and_mul.reference, x_TI2)


@reference.gelu_and_mul.on("chunked")
def gelu_and_mul(x_TI2: Tensor, tanh: bool = False) -> Tensor:
    return _by_chunks(lambda x: reference.gelu_and_mul.reference(x, tanh), x_TI2)
