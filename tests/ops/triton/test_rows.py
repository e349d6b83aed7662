"""Norms, activations and rotation in Triton: equal to their definitions, and by row alone."""

from __future__ import annotations

import random

import pytest
import torch
from ops.triton.kernel_device import DEVICE, DTYPES
from torch import Tensor

from quire.ops.dispatch import OPS
from quire.ops.triton import norm_rope_act  # noqa: F401

torch.set_num_threads(1)
NAMES = ("rms_norm", "add_rms_norm", "rotate", "silu_and_mul", "gelu_and_mul")
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 2e-6},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},  # a rounding more or less
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def made(name: str, rng: random.Random, dtype: torch.dtype) -> tuple:
    """Arguments of a call: sizes, strides and switches drawn at random."""
    torch.manual_seed(rng.randrange(1 << 30))
    tokens, size = rng.choice([1, 2, 7, 33]), rng.choice([1, 8, 48, 96, 130])
    heads, pairs = rng.randint(1, 5), rng.randint(1, max(1, size // 2))
    eps = rng.choice([1e-6, 1e-2])

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    def part() -> Tensor:
        """As the parts of a product of q, k and v lie."""
        return x(tokens, heads + 3, size)[:, 2 : 2 + heads]

    if name == "rms_norm":
        weight = rng.choice([None, x(size)])
        return rng.choice([x(tokens, size), part()]), weight, eps, rng.random() < 0.5
    if name == "add_rms_norm":
        return x(tokens, size), x(tokens, size), x(size), eps, rng.random() < 0.5
    if name == "rotate":
        size = max(size, 2)
        angle = torch.randn(tokens, min(pairs, size // 2), device=DEVICE)
        turn = (angle.cos(), angle.sin(), rng.random() < 0.5)
        return rng.choice([x(tokens, heads, size), part()]), *turn
    call = (3 * x(tokens, 2 * size),)
    return call if name == "silu_and_mul" else (*call, rng.random() < 0.5)


def both(name: str, call: tuple) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel gives, and what the definition gives."""
    answers = []
    for kind in ("triton", "reference"):
        fresh = [t.clone() if name == "add_rms_norm" and isinstance(t, Tensor) else t for t in call]
        got = OPS[name].implementations[kind](*fresh)
        answers.append(list(got) if isinstance(got, tuple) else [got])
    return answers[0], answers[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(name)
    for _ in range(12):
        call = made(name, rng, dtype)
        for got, want in zip(*both(name, call), strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name: str) -> None:
    torch.manual_seed(1)
    x, other, heads = (torch.randn(40, *s, device=DEVICE) for s in ((96,), (96,), (3, 32)))
    weight, angle = torch.randn(96, device=DEVICE), torch.randn(40, 12, device=DEVICE)

    def run(at: slice) -> Tensor:
        call = {
            "rms_norm": (x[at], weight, 1e-6),
            "add_rms_norm": (x[at], other[at], weight, 1e-6),
            "rotate": (heads[at], angle[at].cos(), angle[at].sin()),
            "silu_and_mul": (x[at],),
            "gelu_and_mul": (x[at],),
        }[name]
        return both(name, call)[0][0]

    whole = run(slice(0, 40))
    for at in (slice(0, 1), slice(7, 8), slice(5, 22)):
        assert torch.equal(run(at), whole[at])


def test_nothing_is_computed_on_no_rows() -> None:
    assert OPS["rms_norm"].implementations["triton"](torch.ones(0, 8), None, 1e-6).shape == (0, 8)
    assert OPS["silu_and_mul"].implementations["triton"](torch.ones(0, 8)).shape == (0, 4)
    x, residual = torch.ones(0, 8), torch.ones(0, 8)
    assert OPS["add_rms_norm"].implementations["triton"](x, residual, x[0:0].sum(0), 1e-6)[0] is x
