"""int8 linears: the kernels equal the definition in plain torch, and the definition is near the true product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from quire.quantization.int8 import Int8Weight, quantize
from tests.kernel_builds import BUILDS, NAMES, kernels_of

SHAPES = [(1, 64, 64), (3, 45, 128), (17, 128, 1024), (33, 96, 192), (200, 128, 576)]


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_equal_the_definition(name: str, shape: tuple[int, int, int], gated: bool) -> None:
    kernels = kernels_of(name)
    rows, outs, ins = shape
    outs = 128 if gated else outs
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, ins, generator=rng).bfloat16()
    x[0, 3] = 40  # an outlier
    weight = torch.randn(outs, ins, generator=rng).bfloat16()
    bias = torch.randn(outs, generator=rng).bfloat16()
    mine, plain = Int8Weight.of(weight, gated, kernels), Int8Weight.of(weight, gated, None)
    assert mine.kernels is kernels
    got, want = mine.multiply(x, bias), plain.multiply(x, bias)
    off = (got.float() - want.float()).abs()
    # The integers are the same; the last bit of the scaled sum may round the other way.
    assert float(off.max()) <= 0.008 * float(want.float().abs().max())
    assert float((off > 0).float().mean()) < 0.1
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(mine.multiply(x[row : row + 1].clone(), bias)[0], got[row])


@pytest.mark.parametrize("name", BUILDS)
def test_splitting_wide_inputs_changes_no_bit(name: str) -> None:
    """As many rows and inputs as are met some steps at a time, beside so few rows that they are not."""
    kernels = kernels_of(name)
    rng = torch.Generator().manual_seed(9)
    x = torch.randn(520, 5248, generator=rng).bfloat16()
    linear = Int8Weight.of(torch.randn(192, 5248, generator=rng).bfloat16(), True, kernels)
    few = torch.cat([linear.multiply(part, None) for part in x.split(130)])
    assert torch.equal(linear.multiply(x, None), few)


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.randn(32, 64).bfloat16()
    weight[5] = 0
    x = torch.zeros(2, 64).bfloat16()
    x[1] = 1
    for kernels in (None, *(kernels_of(name) for name in NAMES[:1])):
        y = Int8Weight.of(weight, False, kernels).multiply(x)
        assert not y[0].any()
        assert y[1, 5] == 0


def test_the_definition_is_near_the_product() -> None:
    rng = torch.Generator().manual_seed(1)
    x, weight = torch.randn(50, 512, generator=rng), torch.randn(64, 512, generator=rng)
    y = Int8Weight.of(weight, False, None).multiply(x)
    want = F.linear(x, weight)
    assert float((y - want).norm() / want.norm()) < 0.02


def test_a_weight_is_within_half_a_step() -> None:
    weight = torch.randn(9, 100, generator=torch.Generator().manual_seed(3))
    q, scale = quantize(weight)
    assert int(q.abs().max()) == 127
    assert float((q * scale[:, None] - weight).abs().max()) <= float(scale.max()) / 2 * 1.001
