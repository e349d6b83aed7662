"""Products of int8 codes: the definition's bits, whatever tile, parts, programs and company make them."""

from __future__ import annotations

import random

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES
from torch import Tensor

from benchmarks.gpu import fp8_gemm_tma
from quire.ops.triton import int8_gemm
from quire.ops.triton.fp8_gemm import Tile
from quire.quantization.int8 import Int8Codes, quantize

torch.set_num_threads(1)
SMALL = Tile(16, 16, 32, 4, 2)


def numbers(rng: random.Random, *shape: int) -> Tensor:
    """Rows of very different sizes, one of them zero, and halves between codes."""
    torch.manual_seed(rng.randrange(1 << 30))
    x = torch.randn(shape) * torch.logspace(-4, 4, shape[0])[torch.randperm(shape[0])][:, None]
    x[rng.randrange(shape[0])] *= rng.choice([0.0, 1.0])
    x[0] = torch.randint(-254, 255, shape[1:]) / 2
    x[0, 0] = 127
    return x.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_definitions_to_the_bit(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for _ in range(6):
        x = numbers(rng, rng.choice([1, 5, 9]), rng.choice([32, 130, 4200])).to(dtype)
        x = x.nan_to_num(posinf=6e4, neginf=-6e4)
        got, want = int8_gemm.codes(x), quantize(x)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_the_reference_bits(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    for _ in range(2):
        tokens, outs = rng.choice([1, 3, 17, 40]), rng.choice([16, 40, 90])
        ins = rng.choice([64, 96, 161])
        weight = Int8Codes.of(torch.randn(outs, ins).to(DEVICE), False, None)
        x = numbers(rng, tokens, ins).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)
        bias = rng.choice([None, torch.randn(outs, device=DEVICE).to(dtype)])
        want = weight.reference(x, bias)
        assert torch.equal(weight.multiply(x, bias), want)
        coded, pair = int8_gemm.codes(x), (weight.q_OI, weight.scale_O)
        for tile in (SMALL, SMALL._replace(outputs=32, inputs=64)):
            for parts in (1, 3):
                got = int8_gemm.product(coded, pair, bias, dtype, tile, parts)
                assert got.dtype == dtype
                assert torch.equal(got, want)
        if fp8_gemm_tma.takes(ins):
            by_descriptors = fp8_gemm_tma.product(coded, pair, bias, dtype, tile=SMALL, programs=2)
            assert torch.equal(by_descriptors, want)


def test_sums_beyond_float32_precision_are_exact() -> None:
    """Odd, far beyond 2^24, and back again."""
    half = torch.full((16, 1500), 127, dtype=torch.int8, device=DEVICE)
    weight = torch.cat((half, -half), 1)
    x = torch.full((1, 3000), 127, dtype=torch.int8, device=DEVICE)
    x[0, 7] = 126
    one = torch.ones(16, device=DEVICE)
    for parts in (1, 2):
        y = int8_gemm.product((x, one[:1]), (weight, one), None, torch.float32, SMALL, parts)
        assert y[0].tolist() == [-127.0] * 16


def test_tile_sizes_occupy_the_device() -> None:
    shapes = (
        (1, 4096),
        (17, 4096),
        (33, 28672),
        (65, 28672),
        (100, 4096),
        (512, 4096),
        (8192, 4096),
        (9, 16),
    )
    found = [int8_gemm.tile_for(*shape)[:2] for shape in shapes]
    assert found == [(16, 32), (32, 32), (64, 64), (128, 128), (64, 64), (128, 128), (128, 256), (16, 32)]  # fmt: skip


def test_batching_changes_no_bit_for_any_tile() -> None:
    torch.manual_seed(5)
    weight = Int8Codes.of(torch.randn(48, 1100).to(DEVICE), True, None)
    x = torch.randn(70, 1100, device=DEVICE)
    whole = weight.multiply(x)
    assert whole.shape == (70, 24)
    for at in (slice(0, 1), slice(7, 40), slice(69, 70), slice(5, 5)):
        assert torch.equal(weight.multiply(x[at]), whole[at])
    assert torch.equal(weight.multiply(torch.cat((x, x), 1)[:, 1100:]), whole)
