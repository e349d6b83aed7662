"""Whole numbers of 4 and 8 bits on a device of its own: every layout is kept as it is, and runs as what it stands for.

Where activations become codes too (int8 with a scale a row), a model's answer has the definition's bits.

The kernels run in Triton's interpreter, on a CPU that says of itself what a card would.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton_interpreter  # noqa: F401

from quire.layers.weights import weight_tensors
from quire.quantization import apply, checkpoint_format
from quire.quantization.apply import move, prepared_weights, weight_bytes
from quire.quantization.int4 import quantize_groups
from quire.quantization.int8 import Int8Codes, quantize
from quire.quantization.wna16 import FewBitsWeight
from tests.models.test_native import build, texts
from tests.quantization.cpu_as_accelerator import answer, pretend
from tests.quantization.test_quantized_formats import (
    floats_of,
    linears,
    quantized,
    quantized_linears,
)
from tests.quantization.writers import FORMS, Form, awq, ct_int8, ct_packed, gptq

WHOLE = [form for form in FORMS if form.write in (gptq, awq, ct_packed) and "auto" not in form.name]
ROWS = [form for form in FORMS if form.write is ct_int8]
CLOSE = 1e-4  # of what the same floats give, in float32
CODED = 0.05  # the same where activations are codes


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    for module in (apply, checkpoint_format):
        monkeypatch.setattr(module, "best", lambda: pytest.fail("that would compile CPU kernels"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", WHOLE, ids=lambda form: form.name.replace(" ", "-"))
def test_every_layout_is_loaded_without_conversion(form: Form, plain: Path, tmp_path: Path) -> None:
    checkpoint, dense, means = quantized(plain, tmp_path, form)
    ours, theirs = build(checkpoint), build(dense)
    kept = 0
    for path, layer, names in quantized_linears(ours):
        want = torch.cat([means[name] for name in names])
        if layer.ref.prepared is None:  # its groups do not agree
            torch.testing.assert_close(layer.weight.float(), want)
            continue
        kept += len(names)
        weight = layer.ref.prepared
        assert isinstance(weight, FewBitsWeight)
        assert torch.equal(weight.floats(), want), path
        assert weight.data.nbytes == want.numel() * weight.bits // 8
    assert kept
    text = [token % 131 for token in texts()[1]]
    got, want = answer(ours, text), answer(theirs, text)
    assert (got - want).square().mean().sqrt() < CLOSE * want.std()


def as_defined(model: Any, text: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patched:
        patched.setattr(Int8Codes, "multiply", Int8Codes.reference)
        return answer(model, text)


@pytest.mark.parametrize("form", ROWS, ids=lambda form: form.name.replace(" ", "-"))
def test_a_scale_a_row_is_multiplied_as_codes(
    form: Form, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    checkpoint, dense, means = quantized(plain, tmp_path, form)
    with caplog.at_level(logging.INFO):
        ours, theirs = build(checkpoint), build(dense)
    assert (
        "int8 with one scale per output channel; activations int8, one scale per token"
        in caplog.text
    )
    kept = 0
    for path, layer, names in quantized_linears(ours):
        kept += len(names)
        assert isinstance(layer.ref.prepared, Int8Codes)
        assert torch.equal(floats_of(layer), torch.cat([means[name] for name in names])), path
    assert kept == len(means)
    text = [token % 131 for token in texts()[1]]
    got, want = answer(ours, text), answer(theirs, text)
    assert torch.equal(got, as_defined(ours, text, monkeypatch))
    assert (got - want).square().mean().sqrt() < CODED * want.std()


@pytest.mark.parametrize("scheme", ["int8", "int4_g32"])
def test_a_model_is_quantized_while_loading(
    scheme: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head stays; the model is moved with all that it holds."""
    dense = build(plain)
    ours = build(plain, quantization=scheme)
    assert ours.lm_head.ref.prepared is None
    for (path, layer), (_, want) in zip(linears(ours), linears(dense), strict=True):
        if scheme == "int8":
            q, scale = quantize(want.weight)
            floats = q.float() * scale[:, None]
        else:
            floats = quantize_groups(want.weight, 32).dequantized()
        weight = layer.ref.prepared
        mine = floats_of(layer) if scheme == "int8" else weight.floats()
        assert torch.equal(mine, floats), path
        want.weight.data.copy_(floats)
    assert weight_bytes(ours) < weight_bytes(dense)
    text = texts()[1]
    got, want = answer(ours, text), answer(dense, text)
    close = CODED if scheme == "int8" else CLOSE
    assert (got - want).square().mean().sqrt() < close * want.std()
    assert torch.equal(got, as_defined(ours, text, monkeypatch))
    move(ours, torch.device("meta"))
    assert prepared_weights(ours)
    assert all(each.tensor.is_meta for each in weight_tensors(ours))
