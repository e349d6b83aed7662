"""Products of weights of 4 and 8 bits: equal to their definition, whatever tile and parts take them."""

from __future__ import annotations

import random

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES
from torch import Tensor

from quire.ops.triton import wna16_gemm
from quire.ops.triton.fp8_gemm import Tile
from quire.quantization.group_quant import Grouped
from quire.quantization.wna16 import FewBitsWeight

torch.set_num_threads(1)
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SMALL = Tile(16, 16, 0, 4, 2)


def away(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def weight(rng: random.Random, bits: int, group: int, groups: int, outs: int) -> FewBitsWeight:
    """Whole numbers, zero points and scales of any size, in any order of inputs."""
    torch.manual_seed(rng.randrange(1 << 30))
    ins = group * groups
    q = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (outs, groups), dtype=torch.uint8)
    scale = torch.rand(outs, groups) * torch.logspace(-4, 0, outs)[:, None]
    order = torch.randperm(ins).int() if rng.random() < 0.5 else None
    made = FewBitsWeight(Grouped(q, scale, zero, order), bits, False)
    assert torch.equal(wna16_gemm.unpacked(made.data, bits, made.step), q)
    made.move(torch.device(DEVICE))
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_the_definitions(bits: int, dtype: torch.dtype) -> None:
    rng = random.Random(bits)
    for group, groups in ((32, 3), (64, 2), (128, 1), (192, 2), (96, 1)):
        made = weight(rng, bits, group, groups, rng.choice([16, 40]))
        for tokens in (1, rng.randint(2, 40)):
            x = torch.randn(tokens, made.ins, device=DEVICE).to(dtype)
            bias = rng.choice([None, torch.randn(made.outs, device=DEVICE).to(dtype)])
            want = made.reference(x, bias)
            assert away(made.multiply(x, bias), want) < CLOSE[dtype]


def test_tiles_parts_and_the_library_agree() -> None:
    rng = random.Random(3)
    made = weight(rng, 4, 32, 6, 40)
    made.order_I = None
    x = torch.randn(19, made.ins, device=DEVICE)
    bias = torch.randn(40, device=DEVICE)
    given = (made.data, made.scale_GO, made.zero_GO, bias, made.step)
    want = made.reference(x, bias)
    for parts in (1, 2, 4, 9):
        assert away(wna16_gemm.product(x, *given, tile=SMALL, parts=parts), want) < 2e-6
    assert away(wna16_gemm.by_library(x, *given), want) < 2e-6


def test_weights_are_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = weight(random.Random(4), 8, 64, 2, 40)
    made.order_I = None
    monkeypatch.setattr(wna16_gemm, "MAX_DEQUANTIZED", 17 * made.ins)
    monkeypatch.setattr(wna16_gemm, "MANY", 2)
    x = torch.randn(3, made.ins, device=DEVICE)
    assert away(made.multiply(x), made.reference(x, None)) < 2e-6
