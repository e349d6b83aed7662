"""Quantized KV: the codes lose what they may, and attention over them is the formula over what they stand for."""

from __future__ import annotations

import random

import pytest
import torch
from ops.test_attention import Rows, formula, layer_of
from torch import Tensor

from quire.attention import kv_quantization
from quire.attention.kv_quantization import DTYPES, MAX_CODE, encode, encode_key, hadamard, query

FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2"]
KINDS = ["plain", "one for all", "long window", "all"]


def decoded(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0].float() * pair[1][..., None]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kept", FORMATS)
def test_a_code_is_the_nearest(kept: str) -> None:
    x = drawn(50, 3, 96) * 10 ** drawn(50, 3, 1, seed=1)
    back = decoded(encode(x, DTYPES[kept]))
    most = x.abs().amax(-1, keepdim=True)
    step = {"int8": most / 127, "fp8_e4m3": x.abs() / 8, "fp8_e5m2": x.abs() / 4}[kept]
    least = most / MAX_CODE[DTYPES[kept]] * {"int8": 1, "fp8_e4m3": 2**-9, "fp8_e5m2": 2**-16}[kept]
    assert ((back - x).abs() <= 0.501 * torch.maximum(step, least)).all()
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), most)  # the largest is exact


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize("much", [0.0, 1e-38, 1e30, 3e36])
def test_any_magnitude_has_codes(kept: str, much: float) -> None:
    back = decoded(encode(torch.tensor([[0.5, -1.0, 0.25]]) * much, DTYPES[kept]))
    want = torch.tensor([[0.5, -1.0, 0.25]]) * (much if much > 1e-30 else 0)
    torch.testing.assert_close(back, want, rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [8, 24, 80, 128])
def test_rotation_preserves_products_up_to_a_factor(size: int) -> None:
    a, b = drawn(7, size), drawn(7, size, seed=1)
    span = kv_quantization.hadamard_size(size)
    torch.testing.assert_close((hadamard(a) * hadamard(b)).sum(-1) / span, (a * b).sum(-1))
    torch.testing.assert_close(hadamard(hadamard(a)) / span, a)
    assert size % span == 0
    assert size // span % 2 == 1


def test_turning_saves_a_key_with_channels_that_stand_out() -> None:
    q, k = drawn(200, 128), drawn(200, 128, seed=1)
    k[:, [3, 40, 77]] *= 20
    q[:, [3, 40, 77]] /= 20
    want = (q * k).sum(-1)
    plain = (q * decoded(encode(k, torch.int8))).sum(-1)
    ours = (query(q, torch.int8) * decoded(encode_key(k, torch.int8))).sum(-1)
    assert (ours - want).norm() < 0.5 * (plain - want).norm()
    assert (ours - want).norm() < 0.06 * want.norm()


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_the_formula_over_decoded_values(kind: str, kept: str) -> None:
    rows = Rows(layer_of(kind), [23, 70, 1], block_size=8, tile=16, kept=kept)
    dtype = DTYPES[kept]
    work = [[(0, 20), (1, 33)], [(1, 36), (0, 1), (2, 1)], [(0, 2), (1, 1)]]
    for step in work:
        for (row, n), out in zip(step, rows.step(step), strict=True):
            at = rows.done[row] - 1
            k, v = rows.k[row][: at + 1], rows.v[row][: at + 1]
            kept_k, kept_v = decoded(encode_key(k, dtype)), decoded(encode(v, dtype))
            want = formula(rows.layer, query(rows.q[row][at], dtype), kept_k, kept_v)
            torch.testing.assert_close(out[n - 1].double(), want, atol=2e-6, rtol=1e-5)
            exact = formula(rows.layer, rows.q[row][at], k, v)
            assert (want - exact).norm() < {"int8": 0.03, "fp8_e4m3": 0.15, "fp8_e5m2": 0.3}[
                kept
            ] * max(1.0, float(exact.norm()))
            assert len(k) == 1 or (want - exact).abs().max() > 0, "nothing was quantized"


@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_same_bits_alone_batched_and_chunked(kind: str, kept: str) -> None:
    lengths = [23, 9, 200, 41]
    alone = [
        Rows(layer_of(kind), lengths, 16, 32, kept=kept).step([(row, n)])[0]
        for row, n in enumerate(lengths)
    ]
    rng = random.Random(5)
    for trial, most in enumerate((1, 40)):
        rows = Rows(layer_of(kind), lengths, 16, 32, seed=trial, kept=kept)
        while left := [r for r, n in enumerate(lengths) if rows.done[r] < n]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            work = [(r, min(rng.randint(1, most), lengths[r] - rows.done[r])) for r in chosen]
            for (row, n), out in zip(work, rows.step(work), strict=True):
                assert torch.equal(out, alone[row][rows.done[row] - n : rows.done[row]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_of_16_bit_models_can_be_quantized(dtype: torch.dtype) -> None:
    short = Rows(layer_of("plain"), [40], 8, 16, dtype=dtype, kept="int8")
    got = short.step([(0, 40)])[0]
    k, v = decoded(encode_key(short.k[0], torch.int8)), decoded(encode(short.v[0], torch.int8))
    want = formula(short.layer, hadamard(short.q[0][39]), k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(got[39].double(), want, atol=4e-3, rtol=8e-3)
