"""Ops: the table of implementations, and the definitions against formulas written another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import quire.ops.cpu.norm_rope_act  # noqa: F401  (it registers ops, which `bind` would do in an empty table)
from quire.ops import dispatch
from quire.ops.dispatch import OPS, bind, op
from quire.ops.reference import (
    add_rms_norm,
    embedding,
    gelu_and_mul,
    linear,
    rms_norm,
    rotate,
    silu_and_mul,
)

torch.set_num_threads(1)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, dispatch.Op]:
    """An empty table of ops, for the time of a test."""
    empty: dict[str, dispatch.Op] = {}
    monkeypatch.setattr(dispatch, "OPS", empty)
    return empty


def double(x: int) -> int:
    """Twice x."""
    return 2 * x


def test_an_op_runs_its_reference_until_another_is_bound(table) -> None:
    made = op(double)
    calls = []

    @made.on("native")
    def _(x: int) -> int:
        calls.append(x)
        return x + x

    assert table == {"double": made}
    assert made.__doc__ == "Twice x."
    assert made(3) == 6
    assert calls == []
    assert bind(("triton", "native")) == {"double": "native"}
    assert made(3) == 6
    assert calls == [3]
    assert made.reference(4) == 8
    assert calls == [3]
    assert bind(("triton",)) == {"double": "reference"}
    assert made(5) == 10
    assert calls == [3]


def test_the_first_available_implementation_is_used(table) -> None:
    one, two = op(double), op(len)
    one.on("slow")(lambda x: 1)
    one.on("fast")(lambda x: 2)
    two.on("slow")(lambda x: 3)
    assert bind(("fast", "slow")) == {"double": "fast", "len": "slow"}
    assert (one(0), two("")) == (2, 3)
    assert bind(()) == {"double": "reference", "len": "reference"}


def test_op_names_are_unique(table) -> None:
    made = op(double)
    with pytest.raises(ValueError, match="already is an op double"):
        op(double)
    with pytest.raises(ValueError, match="double already has an implementation reference"):
        made.on("reference")(double)


def test_every_op_has_a_docstring() -> None:
    assert len(OPS) >= 7
    assert [name for name, each in OPS.items() if not each.__doc__] == []


# ------------------------------------------------------------------------------------ definitions


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm() -> None:
    x, weight = rows(3, 8), rows(8, seed=1)
    mean = (x.double() ** 2).mean(-1, keepdim=True)
    unit = x.double() / (mean + 1e-3).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), unit * weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(rms_norm(x, None, 1e-3).double(), unit, atol=1e-6, rtol=0)
    got = rms_norm(x, weight, 1e-3, plus_one=True)
    torch.testing.assert_close(got.double(), unit * (1 + weight.double()), atol=1e-6, rtol=0)
    small = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-3)
    assert small.dtype == torch.bfloat16
    assert torch.equal(
        rms_norm(x[:, None].expand(3, 2, 8), weight, 1e-3)[:, 1], rms_norm(x, weight, 1e-3)
    )


def test_add_rms_norm_is_both_in_turn() -> None:
    x, residual, weight = rows(3, 8), rows(3, 8, seed=1), rows(8, seed=2)
    normed, total = add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(residual + x, weight, 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_is_a_complex_product(interleaved: bool) -> None:
    x = rows(5, 2, 12)
    angles = rows(5, 4, seed=1)
    got = rotate(x, angles.cos(), angles.sin(), interleaved)
    part = x[..., :8].double()
    pairs = (
        part.unflatten(-1, (4, 2)) if interleaved else part.unflatten(-1, (2, 4)).transpose(-1, -2)
    )
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles.double())[:, None]
    back = torch.view_as_real(turned)
    want = back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(got[..., :8].double(), want, atol=1e-6, rtol=0)
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_gated_activations() -> None:
    x = rows(3, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    want = {
        "silu": gate / (1 + (-gate).exp()) * up,
        "gelu": gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up,
        "tanh": 0.5
        * gate
        * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        * up,
    }
    got = {"silu": silu_and_mul(x), "gelu": gelu_and_mul(x), "tanh": gelu_and_mul(x, True)}
    for name, value in got.items():
        torch.testing.assert_close(value.double(), want[name], atol=1e-6, rtol=0)


def test_linear_and_embedding() -> None:
    x, weight, bias = rows(3, 8), rows(6, 8, seed=1), rows(6, seed=2)
    want = (x.double() @ weight.double().T + bias).float()
    torch.testing.assert_close(linear(x, weight, bias), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(linear(x, weight), want - bias, atol=1e-5, rtol=0)
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(embedding(ids, weight), weight[[5, 0, 5]])


# ------------------------------------------------------------------------------------ same bits


SIZES = (1, 2, 3, 15, 16, 17, 40)


@pytest.mark.parametrize("inner", [72, 96, 37, 256])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(inner: int) -> None:
    """On the CPU in float32; text that is independent of batch mates rests on it."""
    x, weight, bias = rows(64, inner), rows(inner, inner, seed=1), rows(inner, seed=2)
    both, heads = rows(64, 2 * inner, seed=3), rows(64, 3, inner // 2 * 2, seed=4)
    angles = rows(64, inner // 2, seed=5)
    ops = {
        "linear": lambda n: linear(x[:n], weight, bias),
        "rms_norm": lambda n: rms_norm(x[:n], bias, 1e-6),
        "head norm": lambda n: rms_norm(heads[:n], None, 1e-6),
        "add_rms_norm": lambda n: add_rms_norm(x[:n].clone(), both[:n, :inner].clone(), bias, 1e-6)[
            0
        ],
        "rotate": lambda n: rotate(heads[:n], angles[:n].cos(), angles[:n].sin()),
        "silu": lambda n: silu_and_mul(both[:n]),
        "gelu": lambda n: gelu_and_mul(both[:n]),
        "tanh": lambda n: gelu_and_mul(both[:n], True),
    }
    for name, run in ops.items():
        whole = run(64)
        differ = [n for n in SIZES if not torch.equal(run(n), whole[:n])]
        assert differ == [], f"{name} with {inner} features"
