"""Products of routed experts with quantized weights in Triton: int8 codes, and integers of 4 or 8 bits in groups.

Knows codes and scales, each where its weight has them, and the arithmetic of `int8_gemm.py` and `wna16_gemm.py`. Does not know
which pairs are in a block (`experts.py`).

Shape suffixes: as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.experts import CodedWeight
from quire.ops.triton import int8_gemm
from quire.ops.triton.expert_blocks import DTYPES, OUTPUTS, addresses, results_of, store_results
from quire.ops.triton.launch import EXACT, side_by_side

BLOCK_K = 128  # int8 inputs that a program multiplies at once; sums are exact


@triton.jit(do_not_specialize=["pairs"])
def int8_product_kernel(
    x_ptr, x_scale_ptr, places_ptr, expert_ptr, weights_ptr, scales_ptr, biases_ptr, out_ptr, pairs, experts, outs, ins, each,
    DTYPE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """As `expert_product_kernel`, of codes [lines, I] with a scale for each line."""
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
    w = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(tl.int8)), 16)
    scale = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32))
    line = (tl.minimum(pair, pairs - 1) // each).to(tl.int64)
    x_at = x_ptr + line[:, None] * ins + k[None, :]
    w_at = w + n_there[None, :] * ins + k[:, None]
    up_at = w_at + outs.to(tl.int64) * ins
    sums = tl.zeros((M, N), tl.int32)
    others = tl.zeros((M, N), tl.int32)
    for start in range(0, ins, K):
        there = start + k < ins
        x = tl.load(x_at + start, mask=known & there[None, :], other=0)
        part = tl.load(w_at + start, mask=there[:, None], other=0)
        sums += tl.dot(x, part, out_dtype=tl.int32)
        if GATED:
            part = tl.load(up_at + start, mask=there[:, None], other=0)
            others += tl.dot(x, part, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + line)[:, None]
    y = sums.to(tl.float32) * (x_scale * tl.load(scale + n_there)[None, :])
    up = others.to(tl.float32)
    if GATED:
        up = up * (x_scale * tl.load(scale + outs + n_there)[None, :])
    store_results(y, up, biases_ptr, expert, out_ptr, pair, known, n, outs, DTYPE, ACT, BIAS)


@triton.jit
def step_product(
    x_low, x_high, w, scale, zero, o, step, ins, BITS: tl.constexpr, STEP: tl.constexpr
):
    """The inputs of a step, in halves, times the outputs o of a weight; scale, zero: of this step's group."""
    HALF: tl.constexpr = STEP // 2
    half = tl.arange(0, HALF)[:, None]
    if BITS == 4:
        both = tl.load(w + o[None, :] * (ins // 2) + step * HALF + half)
        low = both & 15
        high = both >> 4
    else:
        low = tl.load(w + o[None, :] * ins + step * STEP + half)
        high = tl.load(w + o[None, :] * ins + step * STEP + HALF + half)
    less = tl.load(zero + o).to(tl.int16)[None, :]
    sums = tl.dot(x_low, (low.to(tl.int16) - less).to(x_low.dtype), input_precision="ieee")
    sums = tl.dot(x_high, (high.to(tl.int16) - less).to(x_low.dtype), sums, input_precision="ieee")
    return sums * tl.load(scale + o)[None, :]


@triton.jit(do_not_specialize=["pairs"])
def few_bits_product_kernel(
    x_ptr, places_ptr, expert_ptr, weights_ptr, scales_ptr, zeros_ptr, biases_ptr, out_ptr, pairs, experts, outs, ins,
    steps_each, x_row, each, DTYPE: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As `expert_product_kernel`, of weights as `wna16_gemm.packed` has them; `steps_each`: steps of a group."""
    GATED: tl.constexpr = ACT != "" and ACT != "relu2"
    HALF: tl.constexpr = STEP // 2
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert >= experts:
        return
    pair = tl.load(places_ptr + block * M + tl.arange(0, M))
    known = (pair < pairs)[:, None]
    n = tl.program_id(1) * N + tl.arange(0, N)
    o = tl.minimum(n, outs - 1).to(tl.int64)
    w = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(tl.uint8)), 16)
    scale = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32))
    zero = tl.load(zeros_ptr + expert).to(tl.pointer_type(tl.uint8))
    line = (tl.minimum(pair, pairs - 1) // each).to(tl.int64)
    x_at = x_ptr + line[:, None] * x_row + tl.arange(0, HALF)[None, :]
    sums = tl.zeros((M, N), tl.float32)
    others = tl.zeros((M, N), tl.float32)
    for step in range(ins // STEP):
        group = step // steps_each * outs
        if GATED:
            group = group * 2
        low = tl.load(x_at + step * STEP, mask=known, other=0.0)
        high = tl.load(x_at + step * STEP + HALF, mask=known, other=0.0)
        sums += step_product(low, high, w, scale + group, zero + group, o, step, ins, BITS, STEP)
        if GATED:
            up = o + outs
            others += step_product(
                low, high, w, scale + group, zero + group, up, step, ins, BITS, STEP
            )
    store_results(sums, others, biases_ptr, expert, out_ptr, pair, known, n, outs, DTYPE, ACT, BIAS)


class CodedExperts:
    """The quantized weights of a layer's experts, all of one form.

    Args:
        coded: of each expert. refs: for their biases.
    """

    def __init__(self, coded: Sequence[CodedWeight], refs: Sequence[Any]):
        one = coded[0]
        self.first, self.bits, self.step = one.data.data_ptr(), one.bits, one.step
        self.outs, self.ins = len(one.data), one.data.shape[1] * 8 // one.bits
        self.steps_each = self.ins // len(one.scale) // one.step if one.step else 0
        self.weights_E = addresses([each.data for each in coded])
        self.scales_E = addresses([each.scale for each in coded])
        self.zeros_E = addresses([each.zero for each in coded if each.zero is not None])
        self.biases_E = None if refs[0].bias is None else addresses([ref.bias for ref in refs])

    def product(
        self, x: Tensor, each: int, aligned: tuple[Tensor, Tensor], pairs: int, act: str
    ) -> Tensor:
        """As `FloatExperts.product`."""
        y, m, grid = results_of(x, aligned, self.outs, pairs, act)
        places, expert_B = aligned
        count, outs, biased = len(self.weights_E), y.shape[1], self.biases_E is not None
        how: dict[str, Any] = {
            "DTYPE": DTYPES[x.dtype],
            "ACT": act,
            "BIAS": biased,
            "M": m,
            "N": OUTPUTS,
        }
        if not self.step:
            codes, scales = int8_gemm.codes(x)
            int8_product_kernel[grid](
                codes, scales, places, expert_B, self.weights_E, self.scales_E, self.biases_E, y, pairs, count, outs,
                self.ins, each, K=BLOCK_K, num_warps=4 if m < 64 else 8, num_stages=3, **how, **EXACT,
            )  # fmt: skip
            return y
        x = side_by_side(x)
        few_bits_product_kernel[grid](
            x, places, expert_B, self.weights_E, self.scales_E, self.zeros_E, self.biases_E, y, pairs, count, outs, self.ins,
            self.steps_each, x.stride(0), each, BITS=self.bits, STEP=self.step, num_warps=4 if m < 64 else 8, num_stages=3, **how,
        )  # fmt: skip
        return y
