"""How much memory LoRA adapters take, calculated before anything is loaded; and which modules of a model they may change.

Knows the shapes of a model's linear layers, and the headers of the configured adapters. An adapter takes what its true ranks
take; those that are loaded later are planned with max_lora_rank on every linear layer. Where several ranks split a layer, each
has all of A, and of B its own outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.config.engine import Resolved
from quire.errors import QuireError
from quire.features.lora.adapter_modules import INSIDE_WRAPPER, OF_TOWER, Targets
from quire.models import registry
from quire.models.checkpoint_files import stored_tensors
from quire.models.checkpoint_locator import find_adapter
from quire.models.media import media_model
from quire.models.safetensors_header import header
from quire.models.wrapper_config import wrapper_config
from quire.parallel.layout import RankLayout
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_forecast import construct_part
from quire.worker.memory_plan import MemoryLine

if TYPE_CHECKING:
    from quire.layers.lora import Place


class AdaptedLayer(NamedTuple):
    """Inputs and outputs of a linear layer; `own`: the outputs that one rank has."""

    ins: int
    outs: int
    own: int


LORA_B = ".lora_B.weight"


def forecast_adapters(resolved: Resolved, layout: RankLayout, stage: int) -> MemoryLine:
    """The memory of max_cpu_loras adapters, including the configured ones, in a rank of a stage.

    Of the configured ones, each stage counts the factors for all layers.
    """
    options = resolved.config.lora
    chosen = options.lora_dtype
    item = ITEMSIZE[resolved.dtype if chosen == "auto" else chosen]
    layers = _layers(resolved, layout, stage) | _layers_of_towers(resolved)
    largest = _factors(resolved, layers) * options.max_lora_rank * item
    own = [_bytes_of(resolved, one["path"], layers, largest, item) for one in options.adapters]
    known = sorted(own, reverse=True)[: options.capacity]
    others = options.capacity - len(known)
    parts = [f"{len(known)} of the configuration"] * bool(known)
    parts += [f"{others} to come of max_lora_rank={options.max_lora_rank}"] * bool(others)
    return MemoryLine(
        "adapters",
        sum(known) + others * largest,
        "for " + " and ".join(parts),
        lower="max_cpu_loras or max_lora_rank",
    )


def adapter_targets(resolved: Resolved) -> Targets | None:
    """What adapters of the whole model may change (`lora_targets`), where the worker's model is a stage of it; else None."""
    if resolved.config.parallel.pipeline_parallel_size == 1:
        return None
    from quire.layers.lora import lora_targets

    return Targets(lora_targets(construct_part(resolved.spec)))


def _bytes_of(
    resolved: Resolved, path: str, layers: Mapping[str, AdaptedLayer], largest: int, item: int
) -> int:
    """Bytes of an adapter in memory, by its header. One that cannot be read is refused later, by its reader."""
    config = resolved.config
    try:
        folder = Path(find_adapter(path, config.load, config.model.hf_token))
        tensors = header(folder / "adapter_model.safetensors")
    except (QuireError, OSError):
        return largest
    total = 0
    for name, tensor in tensors.items():
        count = math.prod(tensor["shape"])
        module = name.removeprefix("base_model.model.").removesuffix(LORA_B)
        layer = layers.get(module) or layers.get(INSIDE_WRAPPER.sub("", module, 1))
        if name.endswith(LORA_B) and layer is not None:
            count = count * layer.own // layer.outs
        total += count * item
    return total


def _factors(resolved: Resolved, layers: Mapping[str, AdaptedLayer]) -> int:
    """Elements of an adapter of rank 1 on every linear layer but the head."""
    words, chosen = resolved.hf_config.get("vocab_size"), resolved.config.lora.lora_target_modules
    return sum(
        layer.ins + layer.own
        for name, layer in layers.items()
        if words not in (layer.ins, layer.outs)
        and (not chosen or name.rpartition(".")[2] in chosen)
    )


def _layers(resolved: Resolved, layout: RankLayout, stage: int) -> dict[str, AdaptedLayer]:
    """The linear layers of a stage by their names in checkpoints."""
    config = resolved.hf_config
    impl, _ = registry.choose_impl(resolved.architecture, config, resolved.config.model.model_impl)
    found: dict[str, AdaptedLayer] = {}
    if impl == "native":
        return _unfused(construct_part(resolved.spec, layout, stage).adapter_places())
    stored = stored_tensors(resolved.path, config, resolved.config.load.load_format)
    for name, _, shape in [] if isinstance(stored, int) else stored:
        if len(shape) == 2:
            found[name.removesuffix(".weight")] = AdaptedLayer(shape[1], shape[0], shape[0])
    return found


def _unfused(places: Mapping[str, Place]) -> dict[str, AdaptedLayer]:
    """The layers at these places; of one that has several parts, the parts."""
    names = Counter(id(place.target) for place in places.values())
    return {
        name: AdaptedLayer(place.target.num_in, place.all_outs, place.outs)
        for name, place in places.items()
        if names[id(place.target)] == 1 or place.outs < place.target.num_out
    }


def _layers_of_towers(resolved: Resolved) -> dict[str, AdaptedLayer]:
    """The same of the towers of pictures and sound, of which each rank has the whole."""
    media = media_model(resolved)
    if media is None:
        return {}
    if media.native:
        import torch

        from quire.models.vision_towers.load import construct_tower

        dtype = getattr(torch, resolved.dtype)
        return _unfused(construct_tower(wrapper_config(resolved), media.width, dtype).adapter_places())  # fmt: skip
    stored = stored_tensors(resolved.path, resolved.hf_config, resolved.config.load.load_format)
    return {
        name.removesuffix(".weight"): AdaptedLayer(shape[1], shape[0], shape[0])
        for name, _, shape in ([] if isinstance(stored, int) else stored)
        if len(shape) == 2 and OF_TOWER.search(name)
    }
