"""Write quantized checkpoints by round-to-nearest (RTN), in the formats of other tools.

Knows the formats' tensors and config.json. The usual tools calibrate on data and lose less quality.

Shape suffixes: I inputs, O outputs, G groups, S inputs of a group, W words.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TOP = 15  # the largest 4-bit code


def int8(weight_OI: Tensor) -> dict[str, Tensor]:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight_OI / scale_O1).round().to(torch.int8), "weight_scale": scale_O1}


def gptq(weight_OI: Tensor) -> dict[str, Tensor]:
    w_OGS = weight_OI.unflatten(1, (-1, GROUP))
    scale_OG = (w_OGS.abs().amax(2) * 2 / TOP).half()
    q_OGS = (w_OGS / scale_OG.float()[:, :, None]).round() + 8
    zero_GO = torch.full(
        scale_OG.T.shape, 7
    )  # the first version of the format stores zero points less one
    return {
        "qweight": packed(q_OGS.clamp(0, TOP).flatten(1)).T.contiguous(),
        "qzeros": packed(zero_GO),
        "scales": scale_OG.T.contiguous(),
        "g_idx": torch.arange(weight_OI.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(weight_OI: Tensor) -> dict[str, Tensor]:
    w_OGS = weight_OI.unflatten(1, (-1, GROUP))
    low_OG, high_OG = w_OGS.amin(2).clamp(max=0), w_OGS.amax(2).clamp(min=0)
    scale_OG = ((high_OG - low_OG) / TOP).half()
    zero_OG = (-low_OG / scale_OG.float()).round().clamp(0, TOP)
    q_OGS = (w_OGS / scale_OG.float()[:, :, None]).round() + zero_OG[:, :, None]
    return {
        "qweight": packed(q_OGS.clamp(0, TOP).flatten(1).T, AWQ_ORDER),
        "qzeros": packed(zero_OG.T, AWQ_ORDER),
        "scales": scale_OG.T.contiguous(),
    }


def fp8(weight_OI: Tensor) -> dict[str, Tensor]:
    scale = weight_OI.abs().max() / 448
    return {"weight": (weight_OI / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def packed(values_NO: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Pack eight 4-bit values per 32-bit word; `order`: indices of the values from the lowest bits up."""
    parts_NW8 = values_NO.long().unflatten(1, (-1, 8))
    words_NW = sum(parts_NW8[..., value] << 4 * place for place, value in enumerate(order))
    return torch.as_tensor(words_NW).int().contiguous()  # keeps the low 32 bits


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FORMS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "compressed-tensors int8": (int8, {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {**_INT8, "strategy": "channel"},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }},
    }),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}  # fmt: skip
"""Format -> the function that quantizes a weight, and the `quantization_config` of config.json."""


def checkpoint(path: Path, form: str, folder: Path) -> Path:
    """Write the checkpoint at `path` (one safetensors file) in this format, into the folder."""
    write, says = FORMS[form]
    made = folder / form.replace(" ", "-").lower()
    shutil.copytree(path, made, ignore=shutil.ignore_patterns("*.safetensors"))
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        found.update({f"{layer}.{last}": part for last, part in write(tensor.float()).items()})
    save_file(found, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"quantization_config": says}, indent=2)
    (made / "config.json").write_text(text, encoding="utf-8")
    return made
