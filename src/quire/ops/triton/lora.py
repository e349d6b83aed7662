"""LoRA in Triton: shrink and expand over tiles of tokens, adapter by adapter.

Knows addresses of factors in the table's `device_rows`, which stay where they are, so that a step can be captured in a graph and
replayed with other adapters. Does not know layers. Adapters of a tile come one after the other, and one that many tokens share
is read once a tile. Sums run in one order, so a token's bits do not depend on the others.

Shape suffixes: as in `ops/lora.py`. In kernels: M tokens, N outputs or rows of A, K inputs or ranks of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import lora as definitions
from quire.ops.lora import FIELDS, PART_FIELDS, LoraTable
from quire.ops.triton.launch import runs_on, side_by_side

TOKENS, OUTPUTS, RANKS, INPUTS = 16, 64, 16, 64  # of a program
SPLIT = 4  # programs that share the rows of A
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x_ptr, numbers_ptr, rows_ptr, h_ptr, tokens, ins, padded, x_row, h_row, row_size,
    DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """h [tokens, rank] = scale * A x; the programs of axis 1 share the rows of A."""
    t = tl.program_id(0) * M + tl.arange(0, M)
    number = tl.load(numbers_ptr + t, mask=t < tokens, other=-1)
    n, k = tl.arange(0, N), tl.arange(0, K)
    current = tl.max(number, axis=0)
    while current >= 0:
        here = number == current
        row = rows_ptr + current * row_size
        a = tl.load(row).to(tl.pointer_type(DTYPE))
        scales = tl.load(row + 4).to(tl.pointer_type(tl.float32))
        rank = tl.load(row + 5)
        for first in range(tl.program_id(1) * N, rank, tl.num_programs(1) * N):
            there = first + n < rank
            sums = tl.zeros((M, N), tl.float32)
            for start in range(0, ins, K):
                inside = start + k < ins
                x = tl.load(
                    x_ptr + t.to(tl.int64)[:, None] * x_row + (start + k)[None, :],
                    mask=here[:, None] & inside[None, :],
                    other=0.0,
                )
                part = tl.load(
                    a + (first + n)[None, :] * padded + (start + k)[:, None],
                    mask=there[None, :] & inside[:, None],
                    other=0.0,
                )
                sums = tl.dot(x, part, sums, input_precision="ieee")
            scale = tl.load(scales + first + n, mask=there, other=0.0)
            offsets = h_ptr + t.to(tl.int64)[:, None] * h_row + (first + n)[None, :]
            tl.store(offsets, sums * scale[None, :], mask=here[:, None] & there[None, :])
        current = tl.max(tl.where(number < current, number, -1), axis=0)


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    y_ptr, numbers_ptr, rows_ptr, h_ptr, tokens, y_row, h_row, row_size, DTYPE: tl.constexpr, FIELDS: tl.constexpr,
    PART_FIELDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y = (y + B h) * gain + offset, for N outputs of M tokens."""
    t = tl.program_id(0) * M + tl.arange(0, M)
    number = tl.load(numbers_ptr + t, mask=t < tokens, other=-1)
    n, k = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    current = tl.max(number, axis=0)
    while current >= 0:
        here = number == current
        row = rows_ptr + current * row_size
        b = tl.load(row + 1).to(tl.pointer_type(DTYPE))
        gain, offset = tl.load(row + 2), tl.load(row + 3)
        for i in range(tl.load(row + 6)):
            part = row + FIELDS + i * PART_FIELDS
            start, outs = tl.load(part), tl.load(part + 1)
            first, rank, offsets = tl.load(part + 2), tl.load(part + 3), tl.load(part + 4)
            inside = (n >= start) & (n < start + outs)
            o = tl.where(inside, n - start, 0)
            sums = tl.zeros((M, N), tl.float32)
            for r in range(0, rank, K):
                there = r + k < rank
                h = tl.load(
                    h_ptr + t.to(tl.int64)[:, None] * h_row + (first + r + k)[None, :],
                    mask=here[:, None] & there[None, :],
                    other=0.0,
                )
                w_at = offsets + (o // 16 * rank * 16 + o % 16)[None, :] + (r + k)[:, None] * 16
                w = tl.load(b + w_at, mask=there[:, None] & inside[None, :], other=0.0)
                sums = tl.dot(h, w.to(tl.float32), sums, input_precision="ieee")
            y_at = y_ptr + t.to(tl.int64)[:, None] * y_row + n[None, :]
            mask = here[:, None] & inside[None, :]
            y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + sums
            if gain != 0:
                y *= tl.load(gain.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0.0)[
                    None, :
                ]
            if offset != 0:
                y += tl.load(offset.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0.0)[
                    None, :
                ]
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
        current = tl.max(tl.where(number < current, number, -1), axis=0)


@definitions.lora.on("triton")
def _lora(x_TI: Tensor, y_TO: Tensor, numbers_T: Tensor, table: LoraTable) -> Tensor:
    rows = table.device_rows
    if rows is None or not runs_on(x_TI) or x_TI.dtype != table.dtype or y_TO.stride(-1) != 1:
        return definitions.lora.reference(x_TI, y_TO, numbers_T, table)
    x_TI, dtype = side_by_side(x_TI), DTYPES[x_TI.dtype]
    tokens, ins = x_TI.shape
    h_TR = torch.empty((tokens, table.width), dtype=torch.float32, device=x_TI.device)
    tiles, padded = triton.cdiv(tokens, TOKENS), ins + -ins % definitions.LANES
    shrink_kernel[(tiles, SPLIT)](
        x_TI, numbers_T, rows, h_TR, tokens, ins, padded, x_TI.stride(0), table.width, rows.shape[1],
        DTYPE=dtype, M=TOKENS, N=RANKS, K=INPUTS,
    )  # fmt: skip
    expand_kernel[(tiles, triton.cdiv(y_TO.shape[1], OUTPUTS))](
        y_TO, numbers_T, rows, h_TR, tokens, y_TO.stride(0), table.width, rows.shape[1],
        DTYPE=dtype, FIELDS=FIELDS, PART_FIELDS=PART_FIELDS, M=TOKENS, N=OUTPUTS, K=RANKS,
    )  # fmt: skip
    return y_TO
