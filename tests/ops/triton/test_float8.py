"""8-bit floats in Triton: codes to the bit, products equal to their definition, whatever tile and parts take them.

The interpreter rounds to 8 bits otherwise than a device, so the kernel rounds before it casts; products of codes it
makes exactly. So all of it runs here; what only the device's own instructions can show carries the marker.
"""

from __future__ import annotations

import random

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES, needs_row_invariance
from torch import Tensor

from benchmarks.gpu import fp8_gemm_tma
from quire.ops.triton import fp8_gemm
from quire.quantization import fp8
from quire.quantization.fp8 import E4M3, Float8Weight, quantize, scaled_product

torch.set_num_threads(1)
FLOATS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.device)]
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SMALL = fp8_gemm.Tile(16, 16, 32, 4, 2)


def away(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def spread(rng: random.Random, *shape: int) -> Tensor:
    """Rows of very different sizes, one of them zero, with numbers that fall between codes and below the least."""
    torch.manual_seed(rng.randrange(1 << 30))
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[torch.randperm(shape[0])][:, None]
    x[rng.randrange(shape[0])] *= rng.choice([0.0, 1.0])
    x[:, : shape[1] // 2] *= 2.0 ** -rng.randint(0, 14)
    return x.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_equal_the_reference_bits(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for wide in (0, 32, 64, 128):
        for _ in range(4):
            x = spread(rng, rng.choice([1, 5, 9]), rng.choice([32, 96, 130, 416])).to(dtype)
            x = x.nan_to_num(posinf=6e4, neginf=-6e4)
            got, want = fp8_gemm.codes(x, wide), quantize(x, wide)
            assert torch.equal(got[0].float(), want[0].float())
            assert torch.equal(got[1], want[1])


def test_every_fp8_code_is_preserved() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    every = every[every.isfinite()][None].to(DEVICE)
    codes, scale = fp8_gemm.codes(every)
    assert scale.item() == 1
    assert torch.equal(codes.float(), every)


def problem(rng: random.Random, wide: int, high: int, dtype: torch.dtype) -> tuple:
    tokens, outs, ins = (
        rng.choice([1, 3, 17, 40]),
        rng.choice([16, 40, 90]),
        rng.choice([64, 96, 160]),
    )
    weight, x = torch.randn(outs, ins), torch.randn(tokens, ins)
    bias = rng.choice([None, torch.randn(outs).to(DEVICE, dtype)])
    if wide:
        codes, scale = quantize(weight, wide)
        scale = scale[::high].contiguous()
        made = Float8Weight(codes.to(DEVICE), scale.to(DEVICE), False, wide, high)
    else:
        made = Float8Weight.of(weight.to(DEVICE), False)
    return made, x.to(DEVICE, dtype), bias


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("wide", "high"), [(0, 1), (32, 1), (32, 32), (64, 16)])
def test_products_equal_the_definition(wide: int, high: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{wide} {high} {dtype}")
    torch.manual_seed(wide + high)
    for _ in range(2):
        weight, x, bias = problem(rng, wide, high, dtype)
        want = weight.reference(x, bias)
        coded, pair = fp8_gemm.codes(x, wide), (weight.q_OI, weight.scale)
        tile = SMALL._replace(inputs=wide or rng.choice([32, 64]))
        for parts in (1, 3):
            got = fp8_gemm.product(coded, pair, bias, dtype, wide, high, tile, parts)
            assert got.dtype == dtype
            assert away(got, want) < CLOSE[dtype]
        assert away(weight.multiply(x, bias), want) < CLOSE[dtype]


def test_tiles_of_many_rows_are_all_visited() -> None:
    """Nine tiles of tokens: one more than are walked together."""
    torch.manual_seed(3)
    weight, x = Float8Weight.of(torch.randn(20, 32).to(DEVICE), False), torch.randn(136, 32)
    x = x.to(DEVICE)
    pair = weight.q_OI, weight.scale
    got = fp8_gemm.product(fp8_gemm.codes(x), pair, None, torch.float32, tile=SMALL, parts=1)
    assert away(got, weight.reference(x, None)) < 2e-6


@needs_row_invariance
def test_a_rows_bits_do_not_depend_on_the_number_of_rows() -> None:
    """Within one tile of the table; between tiles the device may sum in another order."""
    torch.manual_seed(5)
    weight = Float8Weight.of(torch.randn(32, 1024).to(DEVICE), False)
    x = torch.randn(16, 1024, device=DEVICE)
    assert fp8_gemm.parts_of(32, 1024, fp8_gemm.tile_for(16)) == 2
    whole = weight.multiply(x)
    for at in (slice(0, 1), slice(7, 8), slice(3, 16)):
        assert torch.equal(weight.multiply(x[at]), whole[at])


def test_a_gated_weight_and_a_view_of_x() -> None:
    torch.manual_seed(6)
    weight = Float8Weight.of(torch.randn(64, 96).to(DEVICE), True)
    x = torch.randn(7, 200, device=DEVICE)[:, 50:146]
    assert weight.multiply(x).shape == (7, 32)
    assert away(weight.multiply(x), weight.reference(x, None)) < 2e-6
    assert weight.multiply(x[:0]).shape == (0, 32)


@pytest.mark.parametrize("wide", [0, 32])
def test_by_descriptors_the_sums_are_the_same(wide: int) -> None:
    """More tiles than programs, and shapes that end inside a tile."""
    torch.manual_seed(9)
    tokens, outs, ins = 20, 40, 80
    codes, scale = quantize(torch.randn(outs, ins), wide)
    weight = codes.to(DEVICE), scale.to(DEVICE)
    x = fp8_gemm.codes(torch.randn(tokens, ins, device=DEVICE), wide)
    bias = torch.randn(outs, device=DEVICE)
    for given in (None, bias):
        call = (x, weight, given, torch.float32, wide, 1, SMALL)
        assert fp8_gemm_tma.takes(ins)
        assert torch.equal(
            fp8_gemm_tma.product(*call, programs=2), fp8_gemm.product(*call, parts=1)
        )


def test_the_table_of_ways() -> None:
    assert [fp8_gemm.tile_for(n).tokens for n in (1, 16, 17, 64, 65, 9000)] == [
        16,
        16,
        32,
        64,
        128,
        128,
    ]
    assert fp8_gemm.tile_for(3, wide=128).inputs == 128
    many = (65, 4096, 4096, torch.bfloat16)
    assert fp8_gemm.by_torch(*many)
    assert not fp8_gemm.by_torch(64, *many[1:])
    assert not fp8_gemm.by_torch(*many, wide=128)
    assert not fp8_gemm.by_torch(65, 4090, 4096, torch.bfloat16)
    assert not fp8_gemm.by_torch(65, 4096, 4096, torch.float16)
    # An 8B model's: all processors of a card have a part of each weight, and no part is tiny.
    tile = fp8_gemm.tile_for(1)
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert [fp8_gemm.parts_of(*shape, tile) for shape in shapes] == [4, 4, 1, 4]


def test_torchs_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too torch has it; where it is wrong or missing, it is not used."""
    torch.manual_seed(7)
    weight = Float8Weight.of(torch.randn(64, 96).to(DEVICE), False)
    x, bias = (
        torch.randn(80, 96, device=DEVICE).bfloat16(),
        torch.randn(64, device=DEVICE).bfloat16(),
    )
    got = scaled_product(quantize(x), (weight.q_OI, weight.scale), bias, torch.bfloat16)
    assert away(got, weight.reference(x, bias)) < CLOSE[torch.bfloat16]
    fresh = fp8.torch_can.__wrapped__
    assert fresh(torch.device(DEVICE))
    monkeypatch.setattr(fp8, "scaled_product", lambda x, w, bias, dtype: x[0].to(dtype)[:, :256])
    assert not fresh(torch.device(DEVICE))
    monkeypatch.setattr(fp8, "scaled_product", lambda *call: 1 / 0)
    assert not fresh(torch.device(DEVICE))
