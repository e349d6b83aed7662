"""Attention of packed prompts in Triton against its definition; a prompt's bits are its own."""

from __future__ import annotations

import pytest
import torch

from quire.ops.packed_attention import packed_attention
from quire.ops.triton.packed_attention import _packed_attention as kernel
from tests.ops.triton.kernel_device import DEVICE

LENGTHS = (1, 45, 33)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "biased"),
    [(2, 2, 16, None, False), (4, 2, 24, 7, False), (2, 1, 32, 40, True)],
)
def test_the_kernel_is_the_definition(
    heads: int, kv_heads: int, size: int, window: int | None, biased: bool
) -> None:
    draw, total = torch.Generator().manual_seed(size), sum(LENGTHS)
    starts_B1 = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    qkv = torch.randn(total, heads + 2 * kv_heads, size, generator=draw).to(DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    bias = torch.randn(heads, 2 * max(LENGTHS) - 1, generator=draw).to(DEVICE) if biased else None
    more = (size**-0.5, window, bias)
    want = packed_attention.reference(q, k, v, starts_B1, *more)
    got = kernel(q, k, v, starts_B1.to(DEVICE), *more)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for number, length in list(enumerate(LENGTHS))[1:]:
        own = slice(int(starts_B1[number]), int(starts_B1[number + 1]))
        alone = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        assert torch.equal(kernel(q[own], k[own], v[own], alone, *more), got[own])
