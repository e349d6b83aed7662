"""Floats of quantized layers: the numbers that each format stands for, not rounded again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.quantization_config import stored_quantization
from quire.errors import ConfigError
from quire.quantization.dequantize_layers import with_floats
from tests.quantization.writers import FORMS, Form

LAYER = "visual.blocks.0.attn.qkv"


@pytest.mark.parametrize("form", [pytest.param(form, id=form.name.replace(" ", "-")) for form in FORMS])  # fmt: skip
def test_every_form(form: Form) -> None:
    weight_OI = np.random.default_rng(1).normal(size=(96, 128)).astype(np.float32)
    found, means_OI = form.write(weight_OI, "qkv", **form.how)
    plain = {f"{LAYER}.bias": torch.ones(96), "visual.norm.weight": torch.ones(128)}
    tensors = {**{f"{LAYER}.{part}": value for part, value in found.items()}, **plain}
    stored = stored_quantization({"quantization_config": form.config})
    assert stored is not None
    made = dict(with_floats(iter(tensors.items()), stored, torch.float32))
    activations = {name for name in made if name.endswith(("input_scale", "input_global_scale"))}
    assert made.keys() - activations == {f"{LAYER}.weight", *plain}
    assert all(made[name] is value for name, value in plain.items())
    got = made[f"{LAYER}.weight"]
    assert got.dtype == torch.float32
    assert (got - torch.from_numpy(means_OI)).abs().max() <= 1e-6 * np.abs(means_OI).max()


def test_a_layer_that_config_json_leaves_out_is_named() -> None:
    """Language models inside wrappers have other names in config.json; those of towers are as they are."""
    form = next(form for form in FORMS if form.name == "ct float8")
    found, _ = form.write(np.ones((64, 64), np.float32), "qkv", **form.how)
    for ignored, names in (("re:.*language_model.*", False), ("re:visual.*", True), ("model.visual.blocks.0", True)):  # fmt: skip
        stored = stored_quantization({"quantization_config": {**form.config, "ignore": [ignored]}})
        assert stored is not None
        tensors = ((f"{LAYER}.{part}", value) for part, value in found.items())
        if not names:
            assert dict(with_floats(tensors, stored, torch.float32)).keys() == {f"{LAYER}.weight"}
            continue
        with pytest.raises(ConfigError, match=f"{LAYER}.weight is stored as float8_e4m3fn, but config.json says"):  # fmt: skip
            list(with_floats(tensors, stored, torch.float32))


def test_a_layer_without_its_scales_is_named() -> None:
    form = next(form for form in FORMS if form.name == "gptq")
    found, _ = form.write(np.ones((64, 64), np.float32), "qkv", **form.how)

    def some() -> Iterator[tuple[str, Tensor]]:
        yield from ((f"{LAYER}.{part}", value) for part, value in found.items() if part != "scales")

    stored = stored_quantization({"quantization_config": form.config})
    assert stored is not None
    with pytest.raises(ConfigError, match=rf"quantized layer {LAYER}: it has only .*qweight"):
        list(with_floats(some(), stored, torch.float32))
