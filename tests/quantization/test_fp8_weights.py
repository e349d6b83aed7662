"""FP8 weights on a device that multiplies them: every layout is loaded to the bit and computes its decoded weights.

The kernels run in Triton's interpreter, on a CPU that reports a GPU's properties.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton_interpreter  # noqa: F401
from equality.engines import engine, greedy

from quire.errors import Unsupported
from quire.layers.weights import WeightRef, weight_tensors
from quire.models import load
from quire.platforms.cpu import CpuPlatform
from quire.quantization import apply
from quire.quantization import checkpoint_format as stored
from quire.quantization.apply import move, prepared_weights, weight_bytes
from quire.quantization.fp8 import E4M3, Float8Weight, quantize
from tests.models.cases import Case, write
from tests.models.test_native import build, texts
from tests.quantization.cpu_as_accelerator import answer, pretend
from tests.quantization.test_quantized_formats import linears, quantized, quantized_linears
from tests.quantization.writers import FORMS, FP8, Form, float8

EIGHT = [form for form in FORMS if form.write is float8]
WIDE = {"strategy": "block", "scale_name": "weight_scale_inv"}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(CpuPlatform, "supports", lambda self, dtype: True)


def check(stored: Path, dense: Path, means: dict[str, torch.Tensor], caplog: Any) -> Any:
    with caplog.at_level(logging.INFO):
        ours, theirs = build(stored), build(dense)
    assert "activations 8-bit floats, one scale per token" in caplog.text
    seen = 0
    for path, layer, names in quantized_linears(ours):
        seen += len(names)
        weight = layer.ref.prepared
        assert isinstance(weight, Float8Weight)
        assert weight.q_OI.dtype == E4M3
        assert torch.equal(weight.floats(), torch.cat([means[name] for name in names])), path
    assert seen == len(means)
    text = [token % 131 for token in texts()[1]]
    got, want = answer(ours, text), answer(theirs, text)
    # What is left is the rounding of activations to 4 significant bits.
    assert (got - want).square().mean().sqrt() < 0.1 * want.std()
    return ours


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", EIGHT, ids=lambda form: form.name.replace(" ", "-"))
def test_every_layout_is_loaded_without_conversion(
    form: Form, plain: Path, tmp_path: Path, caplog
) -> None:
    """The scales of q, k and v, which are one matrix, are each their own."""
    checkpoint, dense, means = quantized(plain, tmp_path, form)
    ours = check(checkpoint, dense, means, caplog)
    qkv = ours.get_submodule("model.layers.0.self_attn.qkv").ref.prepared
    if "e8m0" not in form.name:  # powers of two, which random weights share
        assert len(qkv.scale.flatten().unique()) >= 3


def test_parts_that_end_inside_a_block(tmp_path: Path, caplog) -> None:
    """Keys of 12 outputs: blocks begin anew with the values."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 12, "num_attention_heads": 8}
    write(Case("qwen3", "qwen3", {**sizes, "num_key_value_heads": 1}), tmp_path / "plain")
    form = Form("", {**FP8, "weight_block_size": [32, 32]}, float8, WIDE)
    ours = check(*quantized(tmp_path / "plain", tmp_path, form), caplog)
    assert ours.get_submodule("model.layers.0.self_attn.qkv").ref.prepared.high == 1
    assert ours.get_submodule("model.layers.0.mlp.gate_up").ref.prepared.high == 32


def test_unsupported_block_shapes_are_dequantized(plain: Path, tmp_path: Path, caplog) -> None:
    form = Form("", {**FP8, "weight_block_size": [24, 24]}, float8, {**WIDE, "block": 24})
    stored, _, means = quantized(plain, tmp_path, form)
    layer = build(stored).get_submodule("model.layers.0.self_attn.o_proj")
    assert "blocks of 24 inputs are quantized again" in caplog.text
    q, scale = quantize(means["model.layers.0.self_attn.o_proj"])
    assert torch.equal(layer.ref.prepared.floats(), q.float() * scale[:, None])


def test_a_model_is_quantized_while_loading(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale a row; the head and the table stay; the model is moved with all that it holds; no CPU kernel is looked for."""
    dense = build(plain)
    for module in (apply, stored):
        monkeypatch.setattr(module, "best", lambda: pytest.fail("that would compile CPU kernels"))
    ours = build(plain, quantization="fp8")
    assert ours.lm_head.ref.prepared is None
    for (path, layer), (_, want) in zip(linears(ours), linears(dense), strict=True):
        q, scale = quantize(want.weight)
        assert torch.equal(layer.ref.prepared.floats(), q.float() * scale[:, None]), path
    weights = sum(layer.ref.num_in * layer.ref.num_out for _, layer in linears(ours))
    rows = sum(layer.ref.num_out for _, layer in linears(ours))
    assert weight_bytes(dense) - weight_bytes(ours) == 3 * weights - 4 * rows
    text = texts()[1]
    got, want = answer(ours, text), answer(dense, text)
    assert (got - want).square().mean().sqrt() < 0.15 * want.std()  # weights are rounded too
    move(ours, torch.device("meta"))
    assert prepared_weights(ours)
    assert all(each.tensor.is_meta for each in weight_tensors(ours))


@pytest.mark.slow
def test_an_engine_produces_the_reference_tokens(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [text[:9] for text in texts()]  # more than one step takes
    settings = {"block_size": 16, "max_model_len": 64, "quantization": "fp8"}
    with np.errstate(all="ignore"):
        with engine(str(plain), max_num_batched_tokens=16, **settings) as one:
            got = one.tokens(asked, greedy(3))
        monkeypatch.setattr(Float8Weight, "multiply", Float8Weight.reference)
        with engine(str(plain), **settings) as one:
            assert one.tokens(asked, greedy(3)) == got


def test_devices_without_fp8_instructions(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "supports", lambda self, dtype: dtype != "float8_e4m3")
    with pytest.raises(Unsupported, match=r"8-bit floats on .*compute capability 8\.9"):
        build(plain, quantization="fp8")
    assert prepared_weights(build(plain, quantization="int4"))


def test_dummy_weights(plain: Path, tmp_path: Path) -> None:
    stored, _, _ = quantized(plain, tmp_path, EIGHT[0])
    assert answer(build(stored, load_format="dummy"), texts()[1][:4]).isfinite().all()


def test_each_weight_is_quantized_when_complete(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of tensors: a card need not hold the model before it is small."""
    read, waiting = load.tensors, []

    def watched(*asked: Any) -> Any:
        found = sorted(read(*asked), key=lambda item: item[0][::-1])
        yield from found
        ending.append(True)

    ending: list[bool] = []
    install = WeightRef.install

    def noted(ref: WeightRef, prepared: Any) -> None:
        waiting.append(bool(ending))
        install(ref, prepared)

    monkeypatch.setattr(load, "tensors", watched)
    monkeypatch.setattr(WeightRef, "install", noted)
    model = build(plain, quantization="fp8")
    assert waiting == [False] * len(linears(model))
    assert len(prepared_weights(model)) == len(waiting)
