"""Adapters in Triton against their definition, and captured addresses that later adapters use."""

from __future__ import annotations

import pytest
import torch

from quire.ops import lora as definitions
from quire.ops.lora import LoraFactors, LoraTable, NewPart
from quire.ops.triton.lora import _lora as kernel
from tests.ops.triton.kernel_device import DEVICE


def factors(rank: int, ins: int, outs: int, seed: int, dora: bool) -> LoraFactors:
    draw = torch.Generator().manual_seed(seed)

    def randoms(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    split, less = outs // 3, max(1, rank // 2)
    parts = [
        NewPart(0, split, 0.5, randoms(rank, ins), randoms(split, rank)),
        NewPart(split, outs - split, 2.0, randoms(less, ins), randoms(outs - split, less)),
    ]
    vectors = [randoms(outs), randoms(outs)] if dora else []
    return LoraFactors(ins, outs, parts, torch.float32, *vectors)


@pytest.mark.parametrize("sizes", [(1, 5, 7), (16, 64, 96), (33, 77, 131)], ids=str)
def test_the_kernels_are_the_definition(sizes: tuple[int, int, int]) -> None:
    rank, ins, outs = sizes
    tokens, draw = 21, torch.Generator().manual_seed(rank)
    table = LoraTable(3, torch.device(DEVICE), torch.float32, 2 * rank)
    rows = table.device_rows
    numbers_T = torch.randint(-1, 3, (tokens,), generator=draw).to(DEVICE)
    x_TI = torch.randn(tokens, ins, generator=draw).to(DEVICE)
    y_TO = torch.randn(tokens, outs, generator=draw).to(DEVICE)
    for seed in (0, 5):  # the second time in the place of the first
        for number in (0, 2):
            made = factors(rank, ins, outs, seed + number, dora=number == 2)
            made.move(torch.device(DEVICE))
            table.set(number, made)
        want = definitions.lora.reference(x_TI, y_TO.clone(), numbers_T, table)
        got = kernel(x_TI, y_TO.clone(), numbers_T, table)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        assert torch.equal(got[numbers_T < 0], y_TO[numbers_T < 0])
        for t in (0, 20):
            one = slice(t, t + 1)
            alone = kernel(x_TI[one], y_TO[one].clone(), numbers_T[one], table)
            assert torch.equal(alone, got[one])
    assert table.device_rows is rows
    table.set(0, None)
    assert torch.equal(kernel(x_TI, y_TO.clone(), numbers_T.clamp(max=0), table), y_TO)
