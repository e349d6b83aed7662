"""Quantized checkpoints: each format's weights are read to the bit, and the model that runs is the one they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.quantization.group_quant import Grouped
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight, quantize
from tests.models.cases import edit_config
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.quantization.writers import FORMS, PLAIN, Form

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized(plain: Path, folder: Path, form: Form) -> tuple[Path, Path, dict[str, Tensor]]:
    """(checkpoint of the form, checkpoint of the floats it stands for, the floats of each quantized layer by name)"""
    stored, dense, means = {}, {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer, _, last = name.rpartition(".")
        dense[name] = stored[name] = tensor
        if last == "weight" and layer.endswith(LINEARS) and layer != PLAIN:
            del stored[name]
            found, means_OI = form.write(tensor.numpy(), layer.rpartition(".")[2], **form.how)
            stored.update({f"{layer}.{part}": value.contiguous() for part, value in found.items()})
            means[layer] = dense[name] = torch.from_numpy(means_OI)
    paths = []
    for part, tensors in (("stored", stored), ("dense", dense)):
        path = Path(shutil.copytree(plain, folder / part))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(path)
    edit_config(paths[0], quantization_config=form.config)
    return paths[0], paths[1], means


def floats_of(layer: Linear) -> Tensor:
    """What a layer multiplies by."""
    weight: Any = layer.ref.prepared
    if weight is None:
        return layer.weight.data
    if isinstance(weight, Int4Weight):
        return Grouped(weight.q_OI, weight.scale_OG, weight.zero_OG, weight.order_I).dequantized()
    assert isinstance(weight, Int8Weight)
    return weight.q_OI.float() * weight.scale_O[:, None]


def linears(model: nn.Module) -> list[tuple[str, Linear]]:
    return [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Linear)]


def quantized_linears(model: nn.Module) -> Iterator[tuple[str, Linear, list[str]]]:
    """Path, layer and the parts that it was stored as. Those that were stored plain must be."""
    for path, layer in linears(model):
        names = layer.ref.checkpoint_names(path)
        if PLAIN in names:
            assert layer.ref.prepared is None
        else:
            yield path, layer, names


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name.replace(" ", "-"))
def test_every_format_decodes_to_its_weights(form: Form, plain: Path, tmp_path: Path) -> None:
    stored, dense, means = quantized(plain, tmp_path, form)
    ours, theirs = build(stored), build(dense)
    seen = 0
    for path, layer, names in quantized_linears(ours):
        seen += len(names)
        want = torch.cat([means[name] for name in names])
        if form.becomes == "requantized":
            q, scale = quantize(want)
            want = q.float() * scale[:, None]
        assert torch.equal(floats_of(layer), want), path
        kind = {"int4": Int4Weight, "plain": type(None)}.get(form.becomes, Int8Weight)
        if form.becomes != "plain" or not path.endswith("qkv"):
            assert isinstance(layer.ref.prepared, kind) or form.becomes == "plain"
    assert seen == len(means) == 13
    text = texts()[0]
    text = [token % 131 for token in text]
    got, want = (Runner(model).prefill(0, text) for model in (ours, theirs))
    # What is left is the rounding of activations to 8 bits, and of weights where they are made anew.
    assert (got - want).square().mean().sqrt() < 0.05 * want.std()
