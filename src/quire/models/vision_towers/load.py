"""Builds a vision tower from a checkpoint, ready to run.

Knows which wrappers have one, and which tensors go where (by the names that layers give). Does not know file formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.config.engine import ModelSpec
from quire.errors import ConfigError
from quire.layers.weight_slots import Layer, slots_of
from quire.layers.weights import weights_of
from quire.logging import get_logger
from quire.models.checkpoint_files import tower_tensors
from quire.models.construction import construction
from quire.models.dummy_weights import random_tensors
from quire.models.load import missing_tensors
from quire.models.vision import tower_config
from quire.models.vision_towers.base import NativeTower, fitted
from quire.models.vision_towers.pixtral import Mistral3Tower, PixtralTower
from quire.models.vision_towers.qwen_vl import Qwen3Tower, Qwen25Tower, QwenTower
from quire.models.vision_towers.tiles import (
    Gemma3Tower,
    Idefics3Tower,
    LlavaNextTower,
    LlavaOnevisionTower,
    LlavaTower,
    PaliGemmaTower,
)
from quire.quantization.apply import pack_weights, weight_bytes
from quire.quantization.dequantize_layers import with_floats

if TYPE_CHECKING:
    from quire.models.media import MediaModel
    from quire.platforms.base import Platform

log = get_logger(__name__)


def llava_tower(config: Mapping[str, Any], width: int) -> NativeTower:
    """LLaVA 1.5's wrapper is Pixtral's, too."""
    kind = PixtralTower if tower_config(config).get("model_type") == "pixtral" else LlavaTower
    return kind(config, width)


TOWERS: Mapping[str, Callable[[Mapping[str, Any], int], NativeTower]] = {
    "gemma3": Gemma3Tower,
    "idefics3": Idefics3Tower,
    "llava": llava_tower,
    "llava_next": LlavaNextTower,
    "llava_onevision": LlavaOnevisionTower,
    "mistral3": Mistral3Tower,
    "paligemma": PaliGemmaTower,
    "qwen2_vl": QwenTower,
    "qwen2_5_vl": Qwen25Tower,
    "qwen3_vl": Qwen3Tower,
    "qwen3_vl_moe": Qwen3Tower,
    "qwen3_5": Qwen3Tower,
    "smolvlm": Idefics3Tower,
}
"""By model_type of the wrapper."""


def build_tower(
    spec: ModelSpec, model: MediaModel, config: Mapping[str, Any], platform: Platform
) -> NativeTower:
    """`config`: of the wrapper.

    Raises:
        ConfigError: the checkpoint lacks weights of the tower, or has them in other shapes.
    """
    began, device = time.perf_counter(), platform.device
    tower = construct_tower(config, model.width, getattr(torch, spec.dtype))
    if spec.load.load_format == "dummy":
        fill_tower(
            tower, random_tensors(tower, spec.options.seed, device), device, spec.path, renamed=True
        )
    else:
        found = tower_tensors(spec.path, spec.load.load_format, spec.hf_config, spec.dtype)
        if spec.stored is not None and not spec.stored.kinds_in_file:
            own = (each for each in found if tower.own_tensor(*each) is not None)
            found = with_floats(own, spec.stored, getattr(torch, spec.dtype))
        fill_tower(tower, found, device, spec.path)
    if "native" in platform.kernels:
        pack_weights(weights_of(tower))
    seconds = time.perf_counter() - began
    log.info("the vision tower takes %.2f GiB (%.1f s)", weight_bytes(tower) / 2**30, seconds)
    return tower


def construct_tower(config: Mapping[str, Any], width: int, dtype: torch.dtype) -> NativeTower:
    """On "meta", without weights."""
    with construction(dtype):
        return TOWERS[str(config["model_type"])](config, width).eval()


def fill_tower(
    tower: NativeTower,
    found: Iterable[tuple[str, Tensor]],
    device: torch.device,
    path: str,
    *,
    renamed: bool = False,
) -> None:
    """Put each tensor into its slot. `path`: of the checkpoint, for messages; `renamed`: the names are the tower's own.

    Raises:
        ConfigError: as `build_tower`.
    """
    slots = slots_of(tower)
    filled: set[str] = set()
    for called, tensor in found:
        own = (called, tensor) if renamed else tower.own_tensor(called, tensor)
        if own is not None and own[0] in slots:
            slot = slots[own[0]]
            if own[1].dim() > 1:
                tower.stored[own[0].removesuffix(".weight")] = own[1].flatten(1).shape
            slot.fill(fitted(own[1], slot.shape()), device, called)
            filled.add(own[0])
    if missing := missing_tensors(slots, filled):
        names = ", ".join(sorted(missing)[:5])
        raise ConfigError(
            f"the checkpoint in {path} lacks {len(missing)} weights of the towers: {names}. Check that the download is"
            " complete, or serve only its text model with --language-model-only"
        )
    for module in tower.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        if isinstance(module, Layer):
            module.join()
