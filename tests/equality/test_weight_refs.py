"""A layer that lists its weights is loaded, quantized, packed, offloaded and counted, though no module names its class."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine, greedy, make_checkpoint, prompts
from safetensors.torch import load_file, save_file
from test_weight_offload import Apart
from torch import nn

from quire.layers.weights import weights_of
from quire.models import registry
from quire.ops.cpu.bindings import best
from quire.platforms.cpu import CpuPlatform
from quire.quantization.apply import move, weight_bytes
from quire.quantization.bf16_packed import PackedBf16Weight
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight, quantize
from tests.models.cases import edit_config
from tests.models.expert_models import MODELS, StackedExperts, divide, name_architecture
from tests.quantization.writers import compressed

GIB = 1 << 30
SIZES = {"intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(make_checkpoint("qwen3", tmp_path_factory.mktemp("experts"), **SIZES))
    divide(path)
    return path


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, target in MODELS.items():
        monkeypatch.setitem(registry.MODELS, name, target)


def answers(path: Path, name: str, **settings: Any) -> tuple[list[list[int]], int, list[type]]:
    """Tokens, bytes of weights, and what each weight became."""
    name_architecture(path, name)
    with engine(
        str(path), **{"dtype": "bfloat16", "max_num_batched_tokens": 16, **settings}
    ) as one:
        tokens = one.tokens(prompts(3, longest=30), greedy(12))
        model = one.client.core.executor.worker.model
        kinds = [type(ref.prepared) for ref in weights_of(model)]
        if name == "StackedForCausalLM":
            assert any(isinstance(module, StackedExperts) for module in model.modules())
        return tokens, weight_bytes(model), sorted(kinds, key=str)


def both(path: Path, **settings: Any) -> list[type]:
    """The kinds of weights, after a comparison with the same experts as `Linear` modules."""
    want = answers(path, "LinearForCausalLM", **settings)
    assert answers(path, "StackedForCausalLM", **settings) == want
    return want[2]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_packed(checkpoint: Path, depth: int) -> None:
    packed = type(None) if best() is None else PackedBf16Weight
    assert set(both(checkpoint, depth=depth)) == {packed}


@pytest.mark.parametrize(("method", "kind"), [("int8", Int8Weight), ("int4", Int4Weight)])
def test_quantized_while_loading(checkpoint: Path, method: str, kind: type) -> None:
    kinds = both(checkpoint, quantization=method)
    assert kinds.count(kind) == (25 if method == "int8" else 24)  # the head is int8


def test_quantized_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "int8"))
    found = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "_proj.weight" in name:
            found[name], scale_O = quantize(tensor)
            found[f"{name}_scale"] = scale_O[:, None].contiguous()
        else:
            found[name] = tensor
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    int8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
    edit_config(path, quantization_config={**int8, "ignore": ["lm_head"]})
    assert both(path).count(Int8Weight) == 24


def test_random_weights(checkpoint: Path) -> None:
    both(checkpoint, load_format="dummy")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_offloaded(
    quantization: str | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"quantization": quantization, "dtype": "float32"}
    name = "StackedForCausalLM"
    want = answers(checkpoint, name, **settings)
    two_places = Apart()
    monkeypatch.setattr(CpuPlatform, "copier", lambda self: two_places)
    monkeypatch.setattr(CpuPlatform, "kernels", ("reference",))
    found = answers(checkpoint, name, cpu_offload_gb=1e4 / GIB, **settings)
    assert found[0] == want[0]
    assert found[1] < want[1]  # three of four layers share two places
    assert two_places.copies > 3


def test_moved() -> None:
    layer = StackedExperts(64, 32)
    for ref in layer.weights():
        ref.install(Int8Weight.of(torch.randn(ref.num_out, ref.num_in), ref.gated, None))
    model = nn.ModuleList([layer])
    before = weight_bytes(model)
    assert before == sum(ref.num_out * (ref.num_in + 4) for ref in layer.weights())
    move(model, torch.device("cpu"))
    assert weight_bytes(model) == before
