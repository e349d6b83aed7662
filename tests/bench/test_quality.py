"""Quality of short numbers: which schemes there are, the divergence worked out by hand, the page, and one small run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import quality, rtn_checkpoints
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, checkpoint
from quire.config.quantization import online_schemes
from tests.models.test_native import build
from tests.quantization.test_quantized_formats import floats_of


def test_every_quantization_is_listed_and_bfloat16_is_first():
    found = quality.schemes()
    assert next(iter(found.items())) == ("bfloat16", {})
    asked = [keywords.get("quantization") for keywords in found.values()]
    assert set(online_schemes()) == {name for name in asked if name}
    assert {"int8", "fp8_e4m3", "fp8_e5m2"} <= {k.get("kv_cache_dtype") for k in found.values()}
    assert {"gptq", "awq", "compressed-tensors", "fp8"} == {
        rtn_checkpoints.FORMS[k[quality.STORED]][1]["quant_method"]
        for k in found.values()
        if quality.STORED in k
    }


LARGEST_STEP = {
    "compressed-tensors int8": 1 / 127,
    "GPTQ": 2 / 15,
    "AWQ": 2 / 15,
    "fp8": 32 / 448 + 1 / 127,
}
"""From one number to the next, of the largest weight; fp8 is made int8 besides."""


@pytest.mark.parametrize("form", rtn_checkpoints.FORMS)
def test_a_rounded_checkpoint_is_the_model_but_for_half_a_step(form, tmp_path):
    path = checkpoint(SHAPES["tiny-llama"], "float32", tmp_path)
    model = build(rtn_checkpoints.checkpoint(path, form, tmp_path / "made"))
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            continue
        got = floats_of(model.get_submodule(name.removesuffix(".weight")))
        top = float(tensor.abs().max())
        assert 0 < float((got - tensor).abs().max()) <= 0.52 * LARGEST_STEP[form] * top


def test_divergence_worked_by_hand():
    base = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log() + 3.0  # a constant changes nothing
    found = quality.divergence(base, other)
    first = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert found["kl_worst"] == pytest.approx(first)
    assert found["kl_mean"] == pytest.approx(first / 2)
    assert found["same_best"] == 0.5
    assert quality.divergence(base, base)["kl_worst"] == 0.0


def test_page_shows_differences_and_failed_runs():
    row = {"same_answers": 3, "kl_mean": 0.5, "kl_p99": 1.0, "kl_worst": 2.0, "same_best": 0.9}
    schemes = {
        "bfloat16": {"right": {"a": 2, "b": 2}, **row},
        "short": {"right": {"a": 1, "b": 2}, **row},
        "none": {"failed": "no such kernel"},
    }
    text = quality.page({"prompts": {"a": 2, "b": 2}, "texts": 1, "schemes": schemes})
    assert "| short | 75.0% | -25.0% | 75.0% | 0.5 | 1 | 2 | 90.00% |" in text
    assert "| none | could not run: no such kernel |" in text
    assert "| a | 2 | 2 | 1 |" in text


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    words = [
        "quality",
        "--each",
        "2",
        "--only",
        "json",
        "--texts",
        "1",
        "--schemes",
        "int8 KV",
        "GPTQ checkpoint",
    ]
    assert main([*words, "--out", str(tmp_path)]) == 0
    (kept,) = tmp_path.glob("*-quality-*.json")
    base, short, stored = json.loads(kept.read_text())["schemes"].values()
    assert base["right"] == {"json": 2}
    assert base["kl_worst"] == 0.0
    assert 0.0 < short["kl_mean"] < stored["kl_mean"] < 0.02
    assert main(["quality", "--only", "nothing"]) == 2
    assert "--only nothing: not one of json" in capsys.readouterr().err
