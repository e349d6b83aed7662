"""int4 weights: every build of the kernels equals the definition in plain torch, and the definition is near the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import Int4Weight, quantize_groups, quantize_groups_by
from quire.quantization.int8 import Int8Weight, quantize, quantize_by
from tests.kernel_builds import BUILDS, NAMES, kernels_of

# rows, outputs, inputs, inputs of a group
SHAPES = [
    *((1, 64, 64, 32), (2, 45, 128, 64), (3, 32, 256, 128), (5, 64, 96, 96), (12, 64, 1024, 128)),
    *((4, 64, 384, 128), (16, 64, 512, 64), (17, 64, 256, 128), (13, 96, 64, 64)),
    *((33, 160, 192, 32), (40, 64, 576, 192), (90, 128, 640, 128)),
]


def random_weight(outs: int, ins: int, group: int, seed: int, ordered: bool = False) -> Grouped:
    draw = torch.Generator().manual_seed(seed)
    groups = ins // group
    return Grouped(
        torch.randint(0, 16, (outs, ins), generator=draw, dtype=torch.uint8),
        torch.rand(outs, groups, generator=draw) * 0.02,
        torch.randint(0, 16, (outs, groups), generator=draw, dtype=torch.uint8),
        torch.randperm(ins, generator=draw).int() if ordered else None,
    )


def activations(rows: int, ins: int) -> Tensor:
    x = torch.randn(rows, ins, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[0, 3] = 40  # an outlier
    return x


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_equal_the_definition(name: str, gated: bool) -> None:
    kernels = kernels_of(name)
    for number, (rows, outs, ins, group) in enumerate(SHAPES):
        outs = 128 if gated else outs
        weight = random_weight(outs, ins, group, number, ordered=number % 3 == 1)
        bias = torch.randn(outs, generator=torch.Generator().manual_seed(5)).bfloat16()
        bias = None if number % 4 == 2 else bias
        x = activations(rows, ins)
        mine, plain = Int4Weight(weight, gated, kernels), Int4Weight(weight, gated, None)
        assert mine.kernels is kernels
        got, want = mine.multiply(x, bias), plain.multiply(x, bias)
        off = (got.float() - want.float()).abs()
        # The integers are the same; the last bit of the scaled sums may round the other way.
        assert float(off.max()) <= 0.008 * float(want.float().abs().max()), (rows, outs, ins, group)
        assert float((off > 0).float().mean()) < 0.1
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(mine.multiply(x[row : row + 1].clone(), bias)[0], got[row])
        assert torch.equal(mine.multiply(x[:-1], bias), got[:-1])


@pytest.mark.parametrize("ordered", [False, True])
def test_the_definition_is_near_the_product(ordered: bool) -> None:
    weight = random_weight(64, 512, 64, 3, ordered)
    x = torch.randn(50, 512, generator=torch.Generator().manual_seed(1))
    want = F.linear(x, weight.dequantized())
    got = Int4Weight(weight, False, None).multiply(x)
    assert float((got - want).norm() / want.norm()) < 0.02


def test_wide_groups_are_split_without_changing_weights() -> None:
    weight = random_weight(32, 1024, 1024, 4)
    finer = weight.finer()
    assert (weight.group, finer.group) == (1024, 128)
    assert torch.equal(weight.dequantized(), finer.dequantized())
    odd = random_weight(32, 300, 300, 4)
    assert odd.finer().group == 75
    assert random_weight(32, 1022, 1022, 4).finer().group == 1022


def test_rows_of_zeros_stay_zeros() -> None:
    made = quantize_groups(torch.zeros(32, 64), 32)
    assert not made.dequantized().any()
    x = torch.zeros(2, 64).bfloat16()
    x[1] = 1
    weight = quantize_groups(torch.ones(32, 64), 32)
    for kernels in (None, *(kernels_of(name) for name in NAMES[:1])):
        y = Int4Weight(weight, False, kernels).multiply(x)
        assert not y[0].any()
        assert (y[1] == 64).all()


@pytest.mark.parametrize("name", BUILDS)
def test_kernels_quantize_to_the_bit(name: str) -> None:
    kernels = kernels_of(name)
    weight = torch.randn(67, 384, generator=torch.Generator().manual_seed(8))
    weight[3], weight[4], weight[5, :64] = weight[3].abs() + 1, 0, -1e30
    weight = weight.bfloat16()
    for group in (32, 64, 128):
        got, want = quantize_groups_by(kernels, weight, group), quantize_groups(weight, group)
        for part in ("q_OI", "scale_OG", "zero_OG"):
            assert torch.equal(getattr(got, part), getattr(want, part)), (group, part)
    for mine, plain in zip(quantize_by(kernels, weight), quantize(weight), strict=True):
        assert torch.equal(mine, plain)


def test_a_weight_is_within_half_a_step() -> None:
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    weight[3] = weight[3].abs() + 1  # 0 is among the steps all the same
    found = quantize_groups(weight, 64)
    steps = found.scale_OG.repeat_interleave(64, 1)
    # Half a step, and as much where the zero point was rounded.
    assert ((found.dequantized() - weight).abs() <= steps * 1.001).all()
    assert ((found.dequantized() - weight).abs() <= steps * 0.501).float().mean() > 0.98
    assert int(found.q_OI.min()) == 0
    assert int(found.q_OI.max()) == 15


def test_inputs_without_whole_groups_become_int8() -> None:
    weight = torch.randn(32, 48)
    assert isinstance(Int4Weight.of(weight, False, None), Int8Weight)
    assert Int4Weight.of(torch.randn(32, 96), False, None).group == 32
