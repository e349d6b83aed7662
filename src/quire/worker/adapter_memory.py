"""How much memory LoRA adapters take, calculated before anything is loaded.

Knows the shapes of a model's linear layers, and the headers of the configured adapters. An adapter takes what its true ranks
take; those that are loaded later are planned with max_lora_rank on every linear layer.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from quire.config.engine import Resolved
from quire.errors import QuireError
from quire.models import registry
from quire.models.checkpoint_files import stored_tensors
from quire.models.location import find_adapter
from quire.models.safetensors_header import header

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class AdapterMemory(NamedTuple):
    """Bytes of all adapters that may be in memory at once, and how they are counted."""

    num_bytes: int = 0
    about: str = ""


NO_ADAPTERS = AdapterMemory()


def forecast_adapters(resolved: Resolved) -> AdapterMemory:
    """The memory of max_cpu_loras adapters, those of lora_modules among them."""
    options = resolved.config.lora
    if not options.enable_lora:
        return NO_ADAPTERS
    chosen = options.lora_dtype
    item = ITEMSIZE[resolved.dtype if chosen == "auto" else chosen]
    largest = _factors(resolved) * options.max_lora_rank * item
    own = [_bytes_of(resolved, one["path"], largest, item) for one in options.lora_modules]
    known = sorted(own, reverse=True)[: options.capacity]
    others = options.capacity - len(known)
    parts = [f"{len(known)} of lora_modules"] * bool(known)
    parts += [f"{others} to come of max_lora_rank={options.max_lora_rank}"] * bool(others)
    return AdapterMemory(sum(known) + others * largest, " and ".join(parts))


def _bytes_of(resolved: Resolved, path: str, largest: int, item: int) -> int:
    """Bytes of an adapter in memory, by its header. One that cannot be read is refused later, by its reader."""
    config = resolved.config
    try:
        folder = Path(find_adapter(path, config.load, config.model.hf_token))
        tensors = header(folder / "adapter_model.safetensors").values()
    except (QuireError, OSError):
        return largest
    return sum(math.prod(tensor["shape"]) for tensor in tensors) * item


def _factors(resolved: Resolved) -> int:
    """Elements of an adapter of rank 1 on every linear layer but the head."""
    config, chosen = resolved.hf_config, resolved.config.lora.lora_target_modules
    impl, _ = registry.choose_impl(resolved.architecture, config, resolved.config.model.model_impl)
    sizes: dict[str, tuple[int, int]] = {}
    if impl == "native":
        from quire.models.construction import construct

        places = construct(resolved.spec).adapter_places()
        names = Counter(id(place.target) for place in places.values())
        for name, place in places.items():
            if names[id(place.target)] == 1 or place.outs < place.target.num_out:  # not fused
                sizes[name] = place.target.num_in, place.outs
    else:
        found = stored_tensors(resolved.path, config, resolved.config.load.load_format)
        for name, _, shape in [] if isinstance(found, int) else found:
            if len(shape) == 2:
                sizes[name.removesuffix(".weight")] = shape[1], shape[0]
    return sum(
        ins + outs
        for name, (ins, outs) in sizes.items()
        if config.get("vocab_size") not in (ins, outs)
        and (not chosen or name.rpartition(".")[2] in chosen)
    )
