"""Weights of 4 and 8 bits on a device that multiplies floats: every layout is kept as it is, and runs as what it stands for.

The kernels run in Triton's interpreter, on a CPU that says of itself what a card would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import interpreted  # noqa: F401

from quire.layers.linear import PLAIN
from quire.quantization import registry, stored
from quire.quantization.few_bits import FewBitsWeight
from quire.quantization.int4 import quantize_groups
from quire.quantization.int8 import quantize
from quire.quantization.registry import bytes_held, made_weights, move
from tests.models.test_native import build, texts
from tests.quantization.pretending import answer, pretend
from tests.quantization.test_quantized_formats import linears, quantized, quantized_linears
from tests.quantization.writers import FORMS, Form, float8

WHOLE = [form for form in FORMS if form.write is not float8]
CLOSE = 1e-4  # of what the same floats give, in float32


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    for module in (registry, stored):
        monkeypatch.setattr(module, "best", lambda: pytest.fail("that would compile CPU kernels"))


@pytest.mark.parametrize("form", WHOLE, ids=lambda form: form.name.replace(" ", "-"))
def test_every_layout_is_kept_as_it_is(form: Form, plain: Path, tmp_path: Path) -> None:
    checkpoint, dense, means = quantized(plain, tmp_path, form)
    ours, theirs = build(checkpoint), build(dense)
    kept = 0
    for path, layer, names in quantized_linears(ours):
        want = torch.cat([means[name] for name in names])
        if layer.scheme is PLAIN:  # its groups do not agree
            torch.testing.assert_close(layer.weight.float(), want)
            continue
        kept += len(names)
        weight = layer.scheme.weight
        assert isinstance(weight, FewBitsWeight)
        assert torch.equal(weight.floats(), want), path
        assert weight.data.nbytes == want.numel() * weight.bits // 8
    assert kept
    text = [token % 131 for token in texts()[1]]
    got, want = answer(ours, text), answer(theirs, text)
    assert (got - want).square().mean().sqrt() < CLOSE * want.std()


@pytest.mark.parametrize("scheme", ["int8", "int4_g32"])
def test_made_while_loading(scheme: str, plain: Path) -> None:
    """The head stays; the model is moved with all that it holds."""
    dense = build(plain)
    ours = build(plain, quantization=scheme)
    assert ours.lm_head.plain
    for (path, layer), (_, want) in zip(linears(ours), linears(dense), strict=True):
        if scheme == "int8":
            q, scale = quantize(want.weight)
            floats = q.float() * scale[:, None]
        else:
            floats = quantize_groups(want.weight, 32).dequantized()
        assert torch.equal(layer.scheme.weight.floats(), floats), path
        want.weight.data.copy_(floats)
    assert bytes_held(ours) < bytes_held(dense)
    text = texts()[1]
    got, want = answer(ours, text), answer(dense, text)
    assert (got - want).square().mean().sqrt() < CLOSE * want.std()
    move(ours, torch.device("meta"))
    assert all(t.is_meta for weight in made_weights(ours) for t in weight.tensors())
