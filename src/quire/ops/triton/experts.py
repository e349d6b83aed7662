"""Routed experts in Triton: a grouped GEMM over 16-bit weights, each where its layer has it.

Knows pairs of a token and an expert, tiles, and addresses of weights. Does not know layers, routers or quantized weights
(`quantized_experts.py`); for weights of other forms the definition runs. Shapes depend only on the numbers of tokens and experts,
and nothing waits for the device, so a step can be captured in a graph. A sum runs over the inputs in one order, so a token's
result does not depend on the others.

    align      pairs by expert, each expert's filled up to whole blocks of M pairs; the expert of each block
    product    gate and up of each pair with the activation; then down of each pair
    combine    of each token, the sum over its pairs in the router's order, in float32

There are at most T k + min(E, T k) (M - 1) places; programs of the blocks that no expert needs return at once.

Shape suffixes: as in `ops/experts.py`; P places, B blocks, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import experts as definitions
from quire.ops.experts import ExpertWeights
from quire.ops.triton.expert_blocks import (
    DTYPES,
    OUTPUTS,
    addresses,
    align,
    results_of,
    store_results,
)
from quire.ops.triton.launch import runs_on, side_by_side
from quire.ops.triton.quantized_experts import CodedExperts

BLOCK_K = 64
"""Inputs that a program multiplies at once: fixed, so that sums have one order."""


@triton.jit(do_not_specialize=["pairs"])
def expert_product_kernel(
    x_ptr, places_ptr, expert_ptr, weights_ptr, biases_ptr, out_ptr, pairs, experts, outs, ins, x_row, each,
    DTYPE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Lines of x, one for `each` pairs, times the weight [O, I] of their expert; `outs`: the results of a pair.

    weights, biases: addresses by expert. ACT "": none; if it is gated, a weight has twice as many outputs.
    """
    GATED: tl.constexpr = ACT != "" and ACT != "relu2"
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert >= experts:
        return
    pair = tl.load(places_ptr + block * M + tl.arange(0, M))
    known = (pair < pairs)[:, None]
    n = tl.program_id(1) * N + tl.arange(0, N)
    n_there = tl.minimum(n, outs - 1).to(tl.int64)
    k = tl.arange(0, K)
    w = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(DTYPE)), 16)
    x_at = x_ptr + (tl.minimum(pair, pairs - 1) // each).to(tl.int64)[:, None] * x_row + k[None, :]
    w_at = w + n_there[None, :] * ins + k[:, None]
    up_at = w_at + outs.to(tl.int64) * ins
    sums = tl.zeros((M, N), tl.float32)
    others = tl.zeros((M, N), tl.float32)
    for start in range(0, ins, K):
        there = start + k < ins
        x = tl.load(x_at + start, mask=known & there[None, :], other=0.0)
        part = tl.load(w_at + start, mask=there[:, None], other=0.0)
        sums = tl.dot(x, part, sums, input_precision="ieee")
        if GATED:
            part = tl.load(up_at + start, mask=there[:, None], other=0.0)
            others = tl.dot(x, part, others, input_precision="ieee")
    store_results(sums, others, biases_ptr, expert, out_ptr, pair, known, n, outs, DTYPE, ACT, BIAS)


@triton.jit
def combine_kernel(y_ptr, ids_ptr, weights_ptr, out_ptr, experts, size, CHOSEN: tl.constexpr, D: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * D + tl.arange(0, D)
    total = tl.zeros((D,), tl.float32)
    for j in range(CHOSEN):
        expert = tl.load(ids_ptr + t * CHOSEN + j)
        there = (expert >= 0) & (expert < experts)
        part = tl.load(y_ptr + (t * CHOSEN + j) * size + d, mask=there & (d < size), other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + t * CHOSEN + j)
    tl.store(out_ptr + t * size + d, total.to(out_ptr.dtype.element_ty), mask=d < size)


class FloatExperts:
    """The weights of a layer's experts, as floats."""

    def __init__(self, refs: Sequence[Any]):
        self.first = refs[0].weight.data_ptr()
        self.outs, self.ins = refs[0].weight.shape
        self.weights_E = addresses([ref.weight for ref in refs])
        self.biases_E = None if refs[0].bias is None else addresses([ref.bias for ref in refs])

    def product(
        self, x: Tensor, each: int, aligned: tuple[Tensor, Tensor], pairs: int, act: str
    ) -> Tensor:
        """The results of all pairs, [T k, N]; line `pair // each` of x is the input of a pair."""
        y, m, grid = results_of(x, aligned, self.outs, pairs, act)
        x = side_by_side(x)
        expert_product_kernel[grid](
            x, *aligned, self.weights_E, self.biases_E, y, pairs, len(self.weights_E), y.shape[1], self.ins, x.stride(0), each,
            DTYPE=DTYPES[x.dtype], ACT=act, BIAS=self.biases_E is not None, M=m, N=OUTPUTS, K=BLOCK_K,
            num_warps=4 if m < 64 else 8, num_stages=3,
        )  # fmt: skip
        return y


Grouped = FloatExperts | CodedExperts


def grouped(expert_weights: ExpertWeights) -> tuple[Grouped, Grouped] | None:
    """The weights before and after the activation, kept in `of.prepared`; None: no kernel takes them."""
    refs: Sequence[Any] = expert_weights.gate_up
    if not hasattr(refs[0], "prepared"):
        return None
    coded = None if refs[0].prepared is None else refs[0].prepared.coded()
    first = refs[0].weight if coded is None else coded.data
    if expert_weights.prepared is None or expert_weights.prepared[0].first != first.data_ptr():
        both = _grouped(expert_weights.gate_up), _grouped(expert_weights.down)
        if None in both:
            return None
        expert_weights.prepared = both
    found: tuple[Grouped, Grouped] = expert_weights.prepared
    return found


def _grouped(refs: Sequence[Any]) -> Grouped | None:
    if all(ref.prepared is None for ref in refs):
        return FloatExperts(refs) if all(_readable(ref.weight) for ref in refs) else None
    found = [None if ref.prepared is None else ref.prepared.coded() for ref in refs]
    coded = [one for one in found if one is not None and _readable(one.data)]
    if len(coded) < len(refs) or len({(one.bits, one.step, one.scale.shape) for one in coded}) > 1:
        return None
    return CodedExperts(coded, refs)


def _readable(weight: Tensor) -> bool:
    """Whether the kernel can read it by its address alone, 16 bytes at a time."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


def block_for(pairs: int, experts: int) -> int:
    """Pairs of a block: about as many as an expert has. No bits depend on it but by the shape of the device's own instruction."""
    return min(128, max(16, triton.next_power_of_2(pairs // experts)))


@definitions.experts.on("triton")
def experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert_weights: ExpertWeights
) -> Tensor:
    both = (
        grouped(expert_weights) if runs_on(x_TD) and x_TD.dtype in DTYPES and x_TD.numel() else None
    )
    if both is None:
        return definitions.experts.reference(x_TD, ids_TK, weights_TK, expert_weights)
    (tokens, size), (pairs, count) = x_TD.shape, (ids_TK.numel(), len(expert_weights.down))
    aligned = align(ids_TK, count, block_for(pairs, count))
    inner = both[0].product(x_TD, ids_TK.shape[1], aligned, pairs, expert_weights.act)
    y = both[1].product(inner, 1, aligned, pairs, "")
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    combine_kernel[(tokens, triton.cdiv(size, 1024))](
        y, ids_TK.contiguous(), weights_TK.contiguous(), out_TD, count, size, CHOSEN=ids_TK.shape[1], D=1024
    )  # fmt: skip
    return out_TD
