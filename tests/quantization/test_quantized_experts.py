"""Mixtures from quantized checkpoints, with one tensor for each expert or one for all; and checkpoints that lack experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import ConfigError
from quire.layers.moe import Experts, Router
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from tests.models.cases import MOE, OSS, Case, edit_config, write
from tests.models.harness import Runner
from tests.models.test_native import build, plain, texts
from tests.quantization.test_quantized_formats import quantized
from tests.quantization.writers import FORMS

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
ALL = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4}  # no choice can flip
QWEN = Case("qwen3 moe", "qwen3_moe", {**SIZES, **ALL, "norm_topk_prob": True})
BY_NAME = {form.name: form for form in FORMS}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write(QWEN, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kind"), [("gptq", Int4Weight), ("awq", Int4Weight), ("ct int8", Int8Weight), ("fp8 blocks", Int8Weight)]
)  # fmt: skip
def test_each_expert_of_a_quantized_checkpoint(
    name: str, kind: type, mixture: Path, tmp_path: Path
) -> None:
    stored, dense, _ = quantized(mixture, tmp_path, BY_NAME[name])
    ours, theirs = build(stored), build(dense)
    experts = [layer for layer in ours.modules() if isinstance(layer, Experts)]
    assert all(type(ref.prepared) is kind for layer in experts for ref in layer.weights())
    assert all(r.ref.prepared is None for r in ours.modules() if isinstance(r, Router))
    text = texts()[0]
    got, want = (Runner(model).prefill(0, text) for model in (ours, theirs))
    assert (got - want).square().mean().sqrt() < 0.05 * want.std()


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_experts_are_quantized_while_loading(method: str, mixture: Path) -> None:
    ours, theirs = build(mixture, quantization=method), build(mixture)
    kind = {"int8": Int8Weight, "int4": Int4Weight}[method]
    experts = [layer for layer in ours.modules() if isinstance(layer, Experts)]
    assert all(type(ref.prepared) is kind for layer in experts for ref in layer.weights())
    assert all(r.ref.prepared is None for r in ours.modules() if isinstance(r, Router))
    runner, text = Runner(ours), texts()[0]
    got, want = runner.prefill(0, text), Runner(theirs).prefill(0, text)
    assert (got - want).square().mean().sqrt() < {"int8": 0.05, "int4": 0.4}[method] * want.std()
    assert torch.equal(runner.prefill(1, text, chunk=7), got)


def oss_in_mxfp4(folder: Path) -> nn.Module:
    """A checkpoint of gpt-oss with experts in MXFP4, and Transformers' model with the same weights."""
    case = Case("gpt-oss", "gpt_oss", {**MOE, **OSS, **SIZES})
    model = write(case, folder)
    found = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in found if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, ins, outs = found.pop(name).shape
        shape = (experts, outs, ins // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=draw)
        found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(floats)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return model


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    theirs = oss_in_mxfp4(tmp_path)
    ours = build(tmp_path, model_impl="quire")
    for text in texts():
        want = plain(theirs, text)
        assert (Runner(ours).prefill(0, text, chunk=11) - want).abs().max() < 1e-4 * want.std()


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_a_missing_expert_is_named(part: str, mixture: Path, tmp_path: Path) -> None:
    lacking = f"model.layers.1.mlp.experts.2.{part}.weight"
    found = load_file(mixture / "model.safetensors")
    del found[lacking]
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((mixture / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=rf"lacks 1 of the tensors .*: {lacking}$"):
        build(tmp_path)


def test_experts_missing_in_one_tensor_are_named(tmp_path: Path) -> None:
    write(Case("gpt-oss", "gpt_oss", {**MOE, **OSS}), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    whole = found.pop(name)
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lacks = r"lacks 6 of the tensors .*: model.layers.1.mlp.experts.0.down_proj.weight, "
    with pytest.raises(ConfigError, match=lacks):
        build(tmp_path)
    found[name] = whole[:5].clone()
    save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"{name} has shape \[5, 32, 48\].* requires \[6, 32, 48\]"
    ):
        build(tmp_path)
