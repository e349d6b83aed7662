"""What the grouped GEMMs of experts share: pairs in blocks of one expert, and the end of a product.

Knows pairs of a token and an expert, and activations. Does not know the form of a weight.

Shape suffixes: as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64  # of a program
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def activated(gate, up, ACT: tl.constexpr):
    """In float32; rounds to the dtype of its inputs where `act_and_mul` does."""
    x, other = gate.to(tl.float32), up.to(tl.float32)
    if ACT == "clamped_swiglu":
        x = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        other = tl.maximum(other, -7.0, propagate_nan=tl.PropagateNan.ALL)
        other = tl.minimum(other, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_pytorch_tanh":
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == "relu2":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        other = y
    else:
        y = x / (1.0 + tl.exp(-x))
    return y.to(gate.dtype).to(tl.float32) * other


@triton.jit
def store_results(
    sums, others, biases_ptr, expert, out_ptr, pair, known, n, outs,
    DTYPE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add the biases to float32 sums [M, N], round, and store the activated results of pairs; `others`: of the second half."""
    GATED: tl.constexpr = ACT != "" and ACT != "relu2"
    if BIAS:
        n_there = tl.minimum(n, outs - 1).to(tl.int64)
        bias = tl.load(biases_ptr + expert).to(tl.pointer_type(DTYPE))
        sums += tl.load(bias + n_there).to(tl.float32)[None, :]
        if GATED:
            others += tl.load(bias + outs + n_there).to(tl.float32)[None, :]
    y = sums.to(DTYPE)
    if ACT != "":
        y = activated(y, others.to(DTYPE), ACT).to(DTYPE)
    tl.store(
        out_ptr + pair.to(tl.int64)[:, None] * outs + n[None, :],
        y,
        mask=known & (n < outs)[None, :],
    )


def align(ids_TK: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor]:
    """The pairs in each place, or T k where there is none; and the expert of each block of m places, or `experts`."""
    ids_P = ids_TK.flatten()
    pairs, device = len(ids_P), ids_P.device
    ids_P = torch.where((ids_P < 0) | (ids_P >= experts), experts, ids_P)
    blocks = triton.cdiv(pairs + min(experts, pairs) * (m - 1), m)
    counts_E = (ids_P[None] == torch.arange(experts, device=device)[:, None]).sum(1)
    ends_E = ((counts_E + m - 1) // m * m).cumsum(0)
    # The pairs by expert, in their order; pairs of no expert are last, after all places.
    order_P = ids_P.argsort(stable=True)
    shift_E = ends_E.new_full((experts + 1,), blocks * m)
    shift_E[1:experts] = ends_E[:-1] - counts_E.cumsum(0)[:-1]
    shift_E[0] = 0
    place_P = torch.arange(pairs, device=device) + shift_E[ids_P[order_P]]
    places = torch.full((blocks * m + pairs + 1,), pairs, device=device)
    places.scatter_(0, place_P.clamp(max=blocks * m + pairs), order_P)
    starts_B = torch.arange(blocks, device=device) * m
    return places[: blocks * m], torch.searchsorted(ends_E, starts_B, right=True)


def results_of(
    x: Tensor, aligned: tuple[Tensor, Tensor], outs: int, pairs: int, act: str
) -> tuple[Tensor, int, tuple[int, int]]:
    """An empty tensor for the results of all pairs, the pairs of a block, and the grid; `outs`: of the weight."""
    places, expert_B = aligned
    outs = outs // 2 if act not in ("", "relu2") else outs
    y = torch.empty((pairs, outs), dtype=x.dtype, device=x.device)
    return y, len(places) // len(expert_B), (len(expert_B), triton.cdiv(outs, OUTPUTS))


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors, on their device."""
    device = tensors[0].device if tensors else None
    return torch.tensor([each.data_ptr() for each in tensors], device=device)
