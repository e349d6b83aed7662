"""A wrapper of Gemma 4 in 8-bit floats, as compressed-tensors writes it: the checkpoint of vLLM's quick start, made tiny."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.models.gemma4 import Gemma4
from quire.quantization.int8 import Int8Weight
from tests.models.cases import edit_config, save
from tests.models.harness import Runner
from tests.models.test_native import build, texts
from tests.models.wrappers import WRAPPERS, make_wrapper
from tests.quantization.test_quantized_formats import floats_of, linears
from tests.quantization.writers import FORMS

SHAPE = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 1,
}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_blocks_of_8_bit_floats(tmp_path: Path) -> None:
    """The text model is quantized in blocks, its vision tower and per-layer projections are not."""
    gemma = next(each for each in WRAPPERS if each.kind == "gemma4")
    config = gemma.config()
    config["text_config"] |= SHAPE
    form = next(each for each in FORMS if each.name == "ct float8 blocks")
    dense, stored = tmp_path / "dense", tmp_path / "stored"
    save(make_wrapper(gemma, config=config), dense)
    floats = load_file(dense / "model.safetensors")
    bytes8 = dict(floats)
    for name, tensor in floats.items():
        layer, _, last = name.rpartition(".")
        if "language_model.layers" in name and layer.endswith(QUANTIZED) and last == "weight":
            found, means_OI = form.write(tensor.numpy(), layer.rpartition(".")[2], **form.how)
            del bytes8[name]
            bytes8 |= {f"{layer}.{part}": value.contiguous() for part, value in found.items()}
            floats[name] = torch.from_numpy(means_OI)
    shutil.copytree(dense, stored)
    for folder, tensors in ((dense, floats), (stored, bytes8)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = ["lm_head", "re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*per_layer.*"]
    edit_config(stored, quantization_config={**form.config, "ignore": ignored})
    ours, theirs = build(stored), build(dense)
    assert isinstance(ours, Gemma4)
    prepared = {path for path, each in linears(ours) if isinstance(each.ref.prepared, Int8Weight)}
    assert len(prepared) == 3 * 4
    for (_, mine), (_, plain) in zip(linears(ours), linears(theirs), strict=True):
        error_OI = floats_of(mine) - plain.weight
        assert (error_OI.abs().amax(1) <= plain.weight.abs().amax(1) / 250).all()
    text = texts()[0]
    got, want = (Runner(model).prefill(0, text) for model in (ours, theirs))
    assert (
        got - want
    ).square().mean().sqrt() < 0.2 * want.std()  # activations in 8 bits, scores unscaled
