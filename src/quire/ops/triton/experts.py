"""Routed experts in Triton: a grouped GEMM over 16-bit weights, each where its layer has it.

Knows pairs of a token and an expert, tiles, and addresses of weights. Does not know layers, routers or quantized weights: for
these the definition runs. Shapes depend only on the numbers of tokens and experts, and nothing waits for the device, so a
step can be captured in a graph. A sum runs over the inputs in one order, so a token's result does not depend on the others.

    align      pairs by expert, each expert's filled up to whole blocks of M pairs; the expert of each block
    product    gate and up of each pair with the activation; then down of each pair
    combine    of each token, the sum over its pairs in the router's order, in float32

There are at most T k + min(E, T k) (M - 1) places; programs of the blocks that no expert needs return at once.

Shape suffixes: as in `ops/experts.py`; P places, B blocks, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import experts as definitions
from quire.ops.experts import ExpertWeights
from quire.ops.triton.launch import runs_on, side_by_side

BLOCK_K = 64
"""Inputs that a program multiplies at once: fixed, so that sums have one order."""
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
    if BIAS:
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


def align(ids_TK: Tensor, experts: int, m: int) -> tuple[Tensor, Tensor]:
    """The pairs in each place, or T k where there is none; and the expert of each block of m places, or `experts`."""
    ids_P = ids_TK.flatten()
    pairs, device = len(ids_P), ids_P.device
    ids_P = torch.where((ids_P < 0) | (ids_P >= experts), experts, ids_P)
    blocks = triton.cdiv(pairs + min(experts, pairs) * (m - 1), m)
    counts_E = (ids_P[None] == torch.arange(experts, device=device)[:, None]).sum(1)
    ends_E = ((counts_E + m - 1) // m * m).cumsum(0)
    # The pairs by expert, in their order; those of no expert are last, and go behind the places.
    order_P = ids_P.argsort(stable=True)
    shift_E = ends_E.new_full((experts + 1,), blocks * m)
    shift_E[1:experts] = ends_E[:-1] - counts_E.cumsum(0)[:-1]
    shift_E[0] = 0
    place_P = torch.arange(pairs, device=device) + shift_E[ids_P[order_P]]
    places = torch.full((blocks * m + pairs + 1,), pairs, device=device)
    places.scatter_(0, place_P.clamp(max=blocks * m + pairs), order_P)
    starts_B = torch.arange(blocks, device=device) * m
    return places[: blocks * m], torch.searchsorted(ends_E, starts_B, right=True)


class Addresses:
    """Of the weights and biases of a layer's experts, on their device."""

    def __init__(self, refs: Any):
        self.first = refs[0].weight.data_ptr()
        self.outs, self.ins = refs[0].weight.shape
        device = refs[0].weight.device
        self.weights_E = torch.tensor([ref.weight.data_ptr() for ref in refs], device=device)
        self.biases_E = None
        if refs[0].bias is not None:
            self.biases_E = torch.tensor([ref.bias.data_ptr() for ref in refs], device=device)


def addresses(of: ExpertWeights) -> tuple[Addresses, Addresses] | None:
    """Kept in `of.prepared`; None: some weight is quantized, or not aligned."""
    refs: list[Any] = [*of.gate_up, *of.down]
    if not hasattr(refs[0], "prepared") or refs[0].prepared is not None:
        return None
    if of.prepared is None or of.prepared[0].first != refs[0].weight.data_ptr():
        if any(ref.prepared is not None or not _readable(ref.weight) for ref in refs):
            return None
        of.prepared = Addresses(of.gate_up), Addresses(of.down)
    found: tuple[Addresses, Addresses] = of.prepared
    return found


def _readable(weight: Tensor) -> bool:
    """Whether the kernel can read it by its address alone, 16 bytes at a time."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


def block_for(pairs: int, experts: int) -> int:
    """Pairs of a block: about those of an expert. No bits depend on it but by the shape of the device's own instruction."""
    return min(128, max(16, triton.next_power_of_2(pairs // experts)))


def product(
    x: Tensor, each: int, aligned: tuple[Tensor, Tensor], of: Addresses, pairs: int, act: str
) -> Tensor:
    """The results of all pairs, [T k, N]; line `pair // each` of x is the input of a pair."""
    places, expert_B = aligned
    outs = of.outs // 2 if act not in ("", "relu2") else of.outs
    y = torch.empty((pairs, outs), dtype=x.dtype, device=x.device)
    m = len(places) // len(expert_B)
    expert_product_kernel[(len(expert_B), triton.cdiv(outs, OUTPUTS))](
        x, places, expert_B, of.weights_E, of.biases_E, y, pairs, len(of.weights_E), outs, of.ins, x.stride(0), each,
        DTYPE=DTYPES[x.dtype], ACT=act, BIAS=of.biases_E is not None, M=m, N=OUTPUTS, K=BLOCK_K,
        num_warps=4 if m < 64 else 8, num_stages=3,
    )  # fmt: skip
    return y


@definitions.experts.on("triton")
def experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, of: ExpertWeights) -> Tensor:
    both = addresses(of) if runs_on(x_TD) and x_TD.dtype in DTYPES and x_TD.numel() else None
    if both is None:
        return definitions.experts.reference(x_TD, ids_TK, weights_TK, of)
    (tokens, size), (pairs, count) = x_TD.shape, (ids_TK.numel(), len(of.down))
    aligned = align(ids_TK, count, block_for(pairs, count))
    inner = product(side_by_side(x_TD), ids_TK.shape[1], aligned, both[0], pairs, of.act)
    y = product(inner, 1, aligned, both[1], pairs, "")
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    combine_kernel[(tokens, triton.cdiv(size, 1024))](
        y, ids_TK.contiguous(), weights_TK.contiguous(), out_TD, count, size, CHOSEN=ids_TK.shape[1], D=1024
    )  # fmt: skip
    return out_TD
