"""Formats against the libraries that write them, where these are installed: compressed-tensors, bitsandbytes, TorchAO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.config.quantization_config import stored_quantization
from quire.layers.linear import Linear
from quire.models.load import construction
from quire.quantization.apply import set_formats
from quire.quantization.dequantize_on_load import decoded

PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4", "NVFP4A16", "MXFP4", "MXFP8"),
)
EXACT = ("W4A16", "W4A16_ASYM", "W8A8", "INT8", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")
"""Presets whose numbers are kept; the others' are rounded to int8 once more."""


def ours(found: Iterable[tuple[str, Tensor]], config: dict[str, Any]) -> Tensor:
    """The weight of the one layer of a checkpoint."""
    from tests.quantization.test_quantized_formats import floats_of

    stored = stored_quantization({"quantization_config": config})
    with construction(torch.float32):
        model = nn.ModuleDict({"proj": Linear(256, 128)})
        set_formats(model, stored, None)
    layer: Any = model["proj"]
    slots = layer.slots("proj")
    for name, tensor in decoded(found, stored, torch.float32):
        if name in slots:
            slots[name].fill(tensor, torch.device("cpu"), name)
    layer.ref.convert()
    return floats_of(layer)


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors(preset: str) -> None:
    ct: Any = pytest.importorskip("compressed_tensors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    model = nn.ModuleDict({"proj": nn.Linear(256, 128, bias=False)})
    nn.init.normal_(model["proj"].weight, generator=torch.Generator().manual_seed(0))
    weight = model["proj"].weight.data.clone()
    scheme = quantization.preset_name_to_scheme(preset, targets=["Linear"])
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme})
    quantization.apply_quantization_config(model, config)
    _calibrate(model["proj"], scheme.weights, weight)
    compressor = ct.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    layer: Any = model["proj"]
    says = {"config_groups": {"group_0": layer.quantization_scheme.model_dump(mode="json")}}
    compressor.decompress_model(model)
    want = model["proj"].weight.data.float()
    got = ours(found.items(), {**says, "quant_method": "compressed-tensors"})
    if preset.startswith("NVFP4"):  # the library gives bfloat16
        assert torch.equal(got.bfloat16(), want.bfloat16())
    elif preset in EXACT:
        assert torch.equal(got, want)
    else:
        assert (got - want).abs().amax() < want.abs().amax() / 127


def _calibrate(layer: Any, args: Any, weight: Tensor) -> None:
    """Set the scales, as the library computes them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    strategy, size = str(args.strategy), args.group_size or 256
    whole = None
    if hasattr(layer, "weight_global_scale"):
        whole = generate_gparam(weight.amin(), weight.amax())
        layer.weight_global_scale.data.copy_(whole)
    if strategy == "block":
        parts = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    elif strategy == "tensor":
        low, high = weight.amin().view(1), weight.amax().view(1)
    else:
        parts = weight.unflatten(1, (-1, size if "group" in strategy else 256))
        low, high = parts.amin(2), parts.amax(2)
    scale, zero = calculate_qparams(
        low, high, args, **({"global_scale": whole} if whole is not None else {})
    )
    layer.weight_scale.data = scale.to(layer.weight_scale.dtype).view(layer.weight_scale.shape)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero.to(layer.weight_zero_point.dtype).view(
            layer.weight_zero_point.shape
        )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(kind: str, nested: bool) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    packed, state = bnb.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    found = {"proj.weight": packed}
    for name, tensor in state.as_dict(packed=True).items():
        found[f"proj.weight.{name}"] = tensor
    got = ours(found.items(), {"quant_method": "bitsandbytes", "load_in_4bit": True})
    torch.testing.assert_close(got, bnb.dequantize_4bit(packed, state), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Int8WeightOnly", "Float8WeightOnly", "IntxWeightOnly"])
def test_torchao(name: str) -> None:
    ao: Any = pytest.importorskip("torchao.quantization")
    core: Any = pytest.importorskip("torchao.core.config")
    files: Any = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    more = {"weight_dtype": torch.int4, "granularity": ao.PerGroup(32)} if "Intx" in name else {}
    config = getattr(ao, f"{name}Config")(**more)
    model = nn.ModuleDict({"proj": nn.Linear(256, 128, bias=False)})
    ao.quantize_(model, config)
    found, _ = files.flatten_tensor_state_dict(model.state_dict())
    says = {"quant_method": "torchao", "quant_type": {"default": core.config_to_dict(config)}}
    want = model["proj"].weight.dequantize().float()
    got = ours(found.items(), says)
    if name == "Float8WeightOnly":  # int8 by row on a CPU
        assert (got - want).abs().amax() < want.abs().amax() / 127
    else:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
