"""Attention of packed prompts in Triton, without a cache: an online softmax over tiles of a prompt's keys.

A program computes QUERIES tokens of one prompt, for one head. Tiles are counted from the prompt's first token, so its bits do not
depend on other prompts. Programs find their prompt on the device: the host does not wait for it.

Shape suffixes: as in `ops/packed_attention.py`. In kernels: M queries of a program, S keys of a tile, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.packed_attention import packed_attention
from quire.ops.triton.launch import EXACT, pow2, runs_on, side_by_side

QUERIES, KEYS, WIDEST = 32, 32, 256
LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["prompts", "middle"])
def packed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, starts_ptr, bias_ptr, prompts, middle, factor, q_token, q_head, k_token, k_head,
    v_token, v_head, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    S: tl.constexpr, WINDOW: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    prompt, tiles = 0, tl.cdiv(tl.load(starts_ptr + 1) - tl.load(starts_ptr), M).to(tl.int32)
    while (item >= tiles) & (prompt < prompts - 1):
        item -= tiles
        prompt += 1
        stop = tl.load(starts_ptr + prompt + 1)
        tiles = tl.cdiv(stop - tl.load(starts_ptr + prompt), M).to(tl.int32)
    start = tl.load(starts_ptr + prompt).to(tl.int64)
    size = (tl.load(starts_ptr + prompt + 1) - start).to(tl.int32)
    query, d = item * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    live = (query < size)[:, None] & (d < D)[None, :]
    q_at = (start + query)[:, None] * q_token + head * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live, other=0.0)
    low, high = 0, tl.where(item < tiles, size, 0)  # programs without a tile have no keys
    if WINDOW > 0:
        low = tl.maximum(0, (item * M - WINDOW + 1) // S * S)
        high = tl.minimum(high, item * M + M + WINDOW - 1)
    top, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    o = tl.zeros([M, BLOCK_D], tl.float32)
    for offsets in range(low, high, S):
        key = offsets + tl.arange(0, S)
        inside = (key < size)[:, None] & (d < D)[None, :]
        k_at = (start + key)[:, None] * k_token + head // G * k_head + d[None, :]
        k = tl.load(k_ptr + k_at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        distance = key[None, :] - query[:, None]
        seen = (key < size)[None, :] & (query < size)[:, None]
        if BIASED:
            bias_at = bias_ptr + head * (2 * middle + 1) + middle + distance
            scores += (
                tl.load(bias_at, mask=seen & (tl.abs(distance) <= middle), other=0.0)
                * 1.4426950408889634
            )
        if WINDOW > 0:
            seen = seen & (tl.abs(distance) < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        weights, fade = tl.exp2(scores - new[:, None]), tl.exp2(top - new)
        total = total * fade + tl.sum(weights, axis=1)
        v_at = (start + key)[:, None] * v_token + head // G * v_head + d[None, :]
        v = tl.load(v_ptr + v_at, mask=inside, other=0.0)
        o = tl.dot(weights.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
        top = new
    o_at = ((start + query)[:, None] * H + head) * D + d[None, :]
    tl.store(o_ptr + o_at, (o / total[:, None]).to(o_ptr.dtype.element_ty), mask=live)


@packed_attention.on("triton")
def _packed_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_B1: Tensor, scale: float, window: int | None = None,
    bias_HL: Tensor | None = None,
) -> Tensor:  # fmt: skip
    T, H, D = q_THD.shape
    if not runs_on(q_THD) or D > WIDEST or not T:
        return packed_attention.reference(q_THD, k_TKD, v_TKD, starts_B1, scale, window, bias_HL)
    q, k, v = (side_by_side(x) for x in (q_THD, k_TKD, v_TKD))
    o_THD = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prompts = len(starts_B1) - 1
    biased, bias = bias_HL is not None, q if bias_HL is None else bias_HL.contiguous()
    packed_kernel[(triton.cdiv(T, QUERIES) + prompts, H)](
        q, k, v, o_THD, starts_B1, bias, prompts, bias.shape[1] // 2 if biased else 0, scale * LOG2E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), G=H // k.shape[1], H=H, D=D,
        BLOCK_D=pow2(D, 16), M=QUERIES, S=KEYS, WINDOW=window or 0, BIASED=biased, **EXACT,
    )  # fmt: skip
    return o_THD
