"""Which tensor of an adapter's file is which factor of which module, by the names and shapes that PEFT writes.

Knows names and shapes; all of them are checked before any data is read. Does not know the model but as names and shapes of its
modules. Source: huggingface/peft, utils/save_and_load.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import ValidationError
from quire.features.lora.peft_config import CONFIG_FILE, PeftConfig
from quire.features.lora.value_limits import check_change, check_values

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",  # older versions of PEFT
}
"""End of a tensor's name -> what it is."""
FACTORS = ("a", "b", "embedding_a", "embedding_b")

Shapes = Mapping[str, tuple[int, ...]]


class Targets(NamedTuple):
    """What adapters may change.

    Attributes:
        sizes: by module of the model, (inputs, outputs).
        encoder_place: what `sizes` would call a module of an encoder beside the model; "": it is none; None: it is of a layer that the
            encoder leaves out.
    """

    sizes: Mapping[str, tuple[int, int]]
    encoder_place: Callable[[str], str | None] = lambda module: ""


INSIDE_WRAPPER = re.compile(r"(language_model|text_model)\.")
"""What the names of a language model inside a vision-language model have more."""
OF_TOWER = re.compile(
    r"(^|\.)(vision|visual|audio|multi_modal|connector|embed_vision|embed_audio|mm_)"
)

# -- names and shapes -------------------------------------------------------------------------------
Places = dict[str, tuple[str, str]]
"""Name of a tensor -> (module, part)."""


def places_of_tensors(
    file: Path,
    shapes: Shapes,
    config: PeftConfig,
    max_rank: int,
    targets: Targets,
    chosen: Sequence[str],
) -> tuple[Places, dict[str, str]]:
    """Which tensor is which, and the module in the model of each module of the file. Tensors that are not part of the
    adapter are left out."""
    places: Places = {}
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    whole: dict[str, int] = {}
    for name, shape in shapes.items():
        module, part = _place(name, config)
        if part == "whole":
            whole[module] = math.prod(shape)
        if part in ("whole", "base_layer") or (chosen and module.rpartition(".")[2] not in chosen):
            continue
        if targets.encoder_place(module) is None:
            continue
        if part in modules.setdefault(module, {}):
            raise ValidationError(f"{file}: {module!a:.200} has two tensors {part}; save the adapter again")  # fmt: skip
        modules[module][part], places[name] = _as_rows(shape), (module, part)
    if whole:
        size = 2 * sum(whole.values()) / 1e6
        raise ValidationError(
            f"{file} replaces whole modules (modules_to_save): {_listed(whole)}; they would take {size:.0f} MB in each adapter."
            " Train these modules with LoRA (target_modules), or merge the adapter into its base model"
        )
    if not modules:
        of = f" for {_listed(chosen)} (lora_target_modules)" if chosen else ""
        raise ValidationError(f"{file} has no LoRA tensors{of}")
    names = _names(modules, targets)
    if strange := [module for module in modules if module not in names]:
        if tower := [module for module in strange if OF_TOWER.search(module)]:
            raise ValidationError(
                f"{file} adapts modules of a vision or audio tower that cannot be adapted: {_listed(tower)}. Tables of positions cannot,"
                " nor a tower that is not loaded (--language-model-only, --limit-mm-per-prompt): train other modules"
                " (target_modules, exclude_modules), or merge the adapter into its base model"
            )
        raise ValidationError(
            f"{file} adapts modules that the model does not have, or that cannot be adapted: {_listed(strange)};"
            f" the model has {_listed(targets.sizes)}"
        )
    for module, parts in modules.items():
        _check_module(module, parts, config, max_rank, targets.sizes[names[module]])
    return places, names


def _as_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a factor of a convolution: its kernels are rows."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape


def _names(modules: Iterable[str], targets: Targets) -> dict[str, str]:
    """Module of the file -> module of the model, for those that the model has. An adapter that was trained on the model
    without its head, or with a head, has one component less or more before its names; one of a vision-language model names its
    language model."""
    sizes = targets.sizes
    before = {target.partition(".")[0] for target in sizes}
    found: dict[str, str] = {}
    taken: set[str] = set()
    for module in modules:
        plain = INSIDE_WRAPPER.sub("", module, 1)
        others = (
            module,
            plain,
            module.partition(".")[2],
            *(f"{first}.{module}" for first in before),
            targets.encoder_place(module) or "",
        )
        name = next((other for other in others if other in sizes), None)
        if name is not None and name not in taken:
            found[module] = name
            taken.add(name)
    return found


def _place(name: str, config: PeftConfig) -> tuple[str, str]:
    """(module, part) of a tensor. Raises ValidationError: no tensor of an adapter has such a name."""
    module = name.removeprefix(PREFIX)
    for end, part in PARTS.items():
        if module.endswith(end):
            module = module.removesuffix(end)
            if "experts" in module.split(".")[-2:] and (
                module.endswith((".experts", ".base_layer"))
            ):
                raise ValidationError(
                    f"{name!a:.200} adapts experts in 3 dimensions (target_parameters), which cannot be served: use"
                    " target_modules, or merge the adapter into its base model"
                )
            return module, part
    if module.endswith(".base_layer.weight"):
        return module.removesuffix(".base_layer.weight"), "base_layer"
    if module.endswith((".bias", ".base_layer.bias")) and config.bias != "none":
        return module.removesuffix(".bias").removesuffix(".base_layer"), "base_bias"
    if module.endswith((".weight", ".bias")) and "lora_" not in module:
        return module.rpartition(".")[0], "whole"
    raise ValidationError(
        f"{name!a:.200} is no tensor of a LoRA adapter that can be served; save it with PEFT"
    )


def _check_module(
    module: str, shapes: Shapes, config: PeftConfig, max_rank: int, sizes: tuple[int, int]
) -> None:
    """Raises ValidationError: the tensors of a module contradict each other, the configuration or the model."""
    ins, outs = sizes
    prefix = "embedding_" if "embedding_a" in shapes or "embedding_b" in shapes else ""
    factors = [prefix + "a", prefix + "b"]
    want: dict[str, tuple[int, ...]] = {}
    if set(shapes) & set(PARTS.values()):
        if missing := [part for part in factors if part not in shapes]:
            raise ValidationError(f"{module} has no tensor {' and '.join(missing)}; save it again")
        rank = config.rank_of(module)
        found = shapes[factors[0]][0] if shapes[factors[0]] else 0
        if found != rank:
            raise ValidationError(
                f"{module} has rank {found}, but {CONFIG_FILE} says {rank} (r, rank_pattern): correct the rank there"
            )
        if rank > max_rank:
            raise ValidationError(
                f"{module} has rank {rank}, more than max_lora_rank={max_rank}: set max_lora_rank={rank} or more"
            )
        config.scale_of(module)
        want = {factors[0]: (rank, ins), factors[1]: (outs, rank)}
        if config.dora and "magnitude" not in shapes:
            raise ValidationError(f"{module} has no lora_magnitude_vector, but use_dora is true")
    if "magnitude" in shapes and not config.dora:
        raise ValidationError(f"{module} has a lora_magnitude_vector, but use_dora is false")
    want |= dict.fromkeys(("bias", "base_bias", "magnitude"), (outs,))
    for part, shape in shapes.items():
        if part == "magnitude" and shape == (1, outs):
            continue  # older versions of PEFT
        if part not in want or shape != want[part]:
            expected = f"needs {list(want[part])}" if part in want else "has no such tensor"
            raise ValidationError(
                f"{module}: {part} has shape {list(shape)!s:.100}, but the model {expected}: it was trained for another"
                " base model"
            )


def _listed(names: Any) -> str:
    names = sorted(names)
    text = ", ".join(f"{name!a:.120}" for name in names[:8])
    return text + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def tensors_by_module(
    stored: Mapping[str, Tensor], places: Places, config: PeftConfig
) -> dict[str, dict[str, Tensor]]:
    """By module and part. Raises ValidationError: a tensor is missing, or has values that cannot be served."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, (module, part) in sorted(places.items()):
        if (tensor := stored.get(name)) is None:
            raise ValidationError("the file changed while it was read")
        check_values(name, tensor)
        found.setdefault(module, {})[part] = tensor.detach().reshape(_as_rows(tuple(tensor.shape)))
    for module, parts in found.items():
        factors = [tensor for part, tensor in parts.items() if part in FACTORS]
        if factors:
            check_change(module, factors, config.rank_of(module), config.scale_of(module))
    return found
