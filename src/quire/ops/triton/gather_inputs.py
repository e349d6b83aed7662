"""Gather the inputs of a step (token ids, positions, slots) from the device's tables of rows.

Knows rows, tokens and blocks. Does not know requests or models. The host sends a few integers per row; the kernels make
the inputs of each token, because the host does not know some token ids yet.

Shape suffixes: T tokens, B rows of the step, R the worker's rows, L tokens of a row, M blocks of a row, X pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import INTERPRETED

CHUNK = 64 if INTERPRETED else 256


@triton.jit
def gather_kernel(
    tokens_ptr, rows_ptr, starts_ptr, firsts_ptr, ids_ptr, positions_ptr, stride, COLS: tl.constexpr
):
    item = tl.program_id(0)
    row = tl.load(rows_ptr + item).to(tl.int64)
    start = tl.load(starts_ptr + item)
    count = tl.load(starts_ptr + item + 1) - start
    offsets = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = offsets < count
    place = (tl.load(firsts_ptr + item) + offsets).to(tl.int64)
    token = tl.load(tokens_ptr + row * stride + place, mask=mask, other=0)
    tl.store(ids_ptr + start + offsets, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + start + offsets, place, mask=mask)


@triton.jit
def slots_kernel(
    blocks_ptr, rows_ptr, starts_ptr, firsts_ptr, slots_ptr, stride, block_size, COLS: tl.constexpr
):
    item = tl.program_id(0)
    row = tl.load(rows_ptr + item).to(tl.int64)
    start = tl.load(starts_ptr + item)
    count = tl.load(starts_ptr + item + 1) - start
    offsets = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = offsets < count
    place = tl.load(firsts_ptr + item) + offsets
    block = tl.load(blocks_ptr + row * stride + place // block_size, mask=mask, other=0)
    slot = block.to(tl.int64) * block_size + place % block_size
    tl.store(slots_ptr + start + offsets, slot, mask=mask)


@triton.jit
def scatter_kernel(
    table_ptr, rows_ptr, places_ptr, starts_ptr, values_ptr, stride, COLS: tl.constexpr
):
    piece = tl.program_id(0)
    start = tl.load(starts_ptr + piece)
    count = tl.load(starts_ptr + piece + 1) - start
    offsets = tl.program_id(1) * COLS + tl.arange(0, COLS)
    into = tl.load(rows_ptr + piece).to(tl.int64) * stride + tl.load(places_ptr + piece) + offsets
    value = tl.load(values_ptr + start + offsets, mask=offsets < count, other=0)
    tl.store(table_ptr + into, value, mask=offsets < count)


def gather(
    token_ids_RL: Tensor, rows_B: Tensor, starts_B1: Tensor, firsts_B: Tensor, num_tokens: int, most: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(token ids, positions), int64 [T]; row b starts at token `firsts_B[b]`; most: maximum of tokens per row."""
    ids_T, positions_T = (
        torch.empty(num_tokens, dtype=torch.int64, device=rows_B.device) for _ in range(2)
    )
    gather_kernel[(len(rows_B), triton.cdiv(most, CHUNK))](
        token_ids_RL, rows_B, starts_B1, firsts_B, ids_T, positions_T, token_ids_RL.stride(0), COLS=CHUNK
    )  # fmt: skip
    return ids_T, positions_T


def slots(
    blocks_RM: Tensor, rows_B: Tensor, starts_B1: Tensor, firsts_B: Tensor, num_tokens: int, most: int,
    block_size: int,
) -> Tensor:  # fmt: skip
    """The slot of each token's key and value, int64 [T]: block * block_size + offset."""
    slots_T = torch.empty(num_tokens, dtype=torch.int64, device=rows_B.device)
    slots_kernel[(len(rows_B), triton.cdiv(most, CHUNK))](
        blocks_RM, rows_B, starts_B1, firsts_B, slots_T, blocks_RM.stride(0), block_size, COLS=CHUNK
    )
    return slots_T


def scatter(
    table: Tensor, rows_X: Tensor, places_X: Tensor, starts_X1: Tensor, values: Tensor, most: int
) -> None:
    """Write pieces of `values` (int32) into a table at (row, first column); most: maximum length of a piece."""
    scatter_kernel[(len(rows_X), triton.cdiv(most, CHUNK))](
        table, rows_X, places_X, starts_X1, values, table.stride(0), COLS=CHUNK
    )
