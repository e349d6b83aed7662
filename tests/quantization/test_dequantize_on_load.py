"""Formats that are decoded while they are read: their numbers, incomplete weights, and what quantizes them further."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.config.quantization_config import stored_quantization
from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.models.checkpoint_files import as_loaded, in_memory, stored_tensors
from quire.quantization.dequantize_on_load import decoded
from quire.quantization.int4 import Int4Weight
from quire.quantization.int8 import Int8Weight
from tests.models.test_native import build
from tests.quantization.test_quantized_formats import quantized
from tests.quantization.writers import FORMS

BY_NAME = {form.name: form for form in FORMS}


@pytest.fixture
def made(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: quantized(plain, tmp_path, BY_NAME[name])[0]


def test_experts_of_gpt_oss() -> None:
    """As Transformers decodes them, in any order of the files."""
    says = stored_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8, generator=draw)
    name, bias = "model.layers.0.mlp.experts.gate_up_proj", torch.ones(3, 8)
    found: list[tuple[str, Tensor]] = [
        (f"{name}_scales", scales), (f"{name}_bias", bias), (f"{name}_blocks", blocks)
    ]  # fmt: skip
    got = dict(decoded(found, says, torch.float32))
    assert list(got) == [f"{name}_bias", name]
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(got[name], want)


@pytest.mark.parametrize(("method", "kind"), [("int8", Int8Weight), ("int4", Int4Weight)])
def test_they_can_be_quantized_further(
    method: str, kind: type, made: Callable[[str], Path]
) -> None:
    model = build(made("ct nvfp4"), quantization=method)
    layers = [layer.ref.prepared for layer in model.modules() if isinstance(layer, Linear)]
    assert len(layers) == 8
    assert all(isinstance(one, kind) for one in layers)


def test_memory_is_counted_as_floats(made: Callable[[str], Path], plain: Path) -> None:
    says: Any = {"quantization_config": BY_NAME["ct mxfp4"].config}
    found = as_loaded(stored_tensors(str(made("ct mxfp4")), says), stored_quantization(says))
    true = in_memory(stored_tensors(str(plain)), 2)
    assert true <= in_memory(found, 2) < 1.05 * true


def lacks_a_scale(found: dict[str, Tensor]) -> str:
    del found["model.layers.0.mlp.up_proj.weight_scale"]
    return "lacks tensors of 1 quantized weights: of model.layers.0.mlp.up_proj it has only weight_global_scale, weight_pa"


def has_short_scales(found: dict[str, Tensor]) -> str:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    found[name] = found[name][:5].clone()
    return r"weight model.layers.0.mlp.up_proj cannot be decoded as nvfp4 \(.*weight_scale \[5, 4\]\): 128 rows"


def has_odd_blocks(found: dict[str, Tensor]) -> str:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    found[name] = found[name][:, :3].clone()
    return r"weight model.layers.0.mlp.up_proj cannot be decoded as nvfp4 \("


@pytest.mark.parametrize("spoil", [lacks_a_scale, has_short_scales, has_odd_blocks])
def test_damaged_weights_are_named(
    spoil: Callable[[dict[str, Tensor]], str], made: Callable[[str], Path]
) -> None:
    path = made("ct nvfp4")
    found = load_file(path / "model.safetensors")
    match = spoil(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=match):
        build(path)
