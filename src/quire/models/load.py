"""Builds a model from a checkpoint, ready to run.

Knows which tensors go where, by the names that layers give (`layers/weight_slots.py`), and the prefixes that wrappers
add to these names. Does not know file formats (`checkpoint_files.py`), or the layers of any family.

    choose        native model or Transformers backend
    construct     on "meta": shapes and names, no memory
    fill          tensor by tensor, from the mapped file; a whole tensor becomes the parameter, parts are copied side by side
    check         no tensor is missing, and no tensor of the decoder is unused
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.config.engine import ModelSpec
from quire.config.quantization import ONLINE
from quire.errors import ConfigError, Unsupported
from quire.layers.weight_slots import Layer, Slot, slots_of
from quire.layers.weights import UNQUANTIZED, WeightRef, weights_of
from quire.logging import get_logger
from quire.models import registry
from quire.models.base import CausalLM, LanguageModel
from quire.models.checkpoint_files import on_disk, stored_tensors, tensors, weight_files
from quire.models.construction import construct, construction
from quire.models.dummy_weights import random_tensors
from quire.models.hf_config import WRAPPED
from quire.models.offload import Offload
from quire.models.pooling.head import without_heads
from quire.models.progress import LoadProgress
from quire.models.tensor_names import UNUSED, OtherStages, is_nothing, of_the_decoder, own_name
from quire.models.transformers.modes import check_weights
from quire.ops.dispatch import bind
from quire.platforms.memory import release_file_pages, separate_blocks
from quire.quantization.apply import (
    convert_weights,
    pack_weights,
    prepared_weights,
    quantize_weight,
    quantize_weights,
    set_formats,
    weight_bytes,
)
from quire.quantization.checkpoint_format import kernels_for
from quire.quantization.dequantize_on_load import decoded
from quire.quantization.gguf_blocks import block_names, set_block_formats
from quire.startup_timer import Report, no_report

if TYPE_CHECKING:
    from quire.platforms.base import Platform

log = get_logger(__name__)

HOST = torch.device("cpu")
SHOWN = 5  # names in a message, at most


def build_model(
    spec: ModelSpec,
    platform: Platform,
    offload: Offload | None = None,
    report: Report = no_report,
) -> LanguageModel:
    """The model of `spec`, with its weights, on the platform's device, in eval mode, without gradients.

    `offload`: which weights stay on the host. `report`: receives the progress.

    Raises:
        ModelNotFound: there are no weights.
        ConfigError: the weights do not match config.json; the message names the tensors.
        Unsupported: Transformers does not have this model, or it cannot be run correctly.
    """
    bind(platform.kernels)
    impl, reason = registry.choose_impl(spec.architecture, spec.hf_config, spec.options.model_impl)
    log.info("%s runs as %s: %s", spec.architecture, impl, reason)
    if spec.quantization or spec.stored is not None:
        _can_quantize(impl, spec, platform)
    progress = LoadProgress(report, bar=spec.load.use_tqdm_on_load)
    if impl == "transformers":
        from quire.models.transformers.model import TransformersModel

        if offload is not None:
            what = f"cpu_offload_gb for {spec.architecture}, which runs through Transformers"
            raise Unsupported(what, "leave it out")
        return TransformersModel.build(spec, platform, progress)
    return _native(spec, platform, offload, progress)


def add_whole_heads(model: LanguageModel, spec: ModelSpec, platform: Platform) -> None:
    """Give the model what each rank has as a whole: the pooler of a model that computes no tokens.

    Raises: as `build_pooler`.
    """
    from quire.models.pooling.head import build_pooler

    model.pooler = build_pooler(spec, platform.device)


def is_accelerator(platform: Platform) -> bool:
    """Whether the platform's kernels multiply floats."""
    return "triton" in platform.kernels


def _can_quantize(impl: str, spec: ModelSpec, platform: Platform) -> None:
    remedy = "serve its float16 or bfloat16 form without --quantization"
    if impl == "transformers":
        check_weights(True, spec.architecture)
    if is_accelerator(platform):
        _can_be_floats(spec, platform, remedy)
        return
    stored = spec.stored
    if stored is not None and stored.kinds_in_file and spec.quantization is None:
        return  # without kernels, blocks become floats
    if kernels_for(getattr(torch, spec.dtype)) is None:
        why = f"there are kernels for bfloat16, not {spec.dtype}"
        if spec.dtype == "bfloat16":
            why = "the native CPU kernels do not run on this machine"
        log.warning("quantized weights run in plain torch, which is many times slower: %s", why)


def _can_be_floats(spec: ModelSpec, platform: Platform, remedy: str) -> None:
    stored = spec.stored
    kinds = {scheme.kind for scheme in stored.schemes()} if stored is not None else set()
    keeps_fp8 = "float" in kinds and spec.quantization is None
    if (keeps_fp8 or spec.quantization == "fp8") and not platform.supports("float8_e4m3"):
        raise Unsupported(
            f"8-bit floats on {platform.description}, which has no instructions for them (compute capability 8.9"
            " and newer have)",
            remedy,
        )


def _native(
    spec: ModelSpec, platform: Platform, offload: Offload | None, progress: LoadProgress
) -> LanguageModel:
    began = time.perf_counter()
    target = registry.class_path(spec.architecture)
    model = construct(spec)
    with construction(getattr(torch, spec.dtype)):
        _set_formats(model, spec, is_accelerator(platform))
    _drop_wide_windows(model, spec.max_model_len)
    with separate_blocks():
        source = _with_weights(model, spec, platform, offload, progress)
    log.info(
        "loaded %s: %.2f GiB in %s from %s, %.1f s",
        *(target.partition(":")[2], weight_bytes(model) / 2**30, spec.dtype),
        *(source, time.perf_counter() - began),
    )
    return model


def _with_weights(
    model: CausalLM,
    spec: ModelSpec,
    platform: Platform,
    offload: Offload | None,
    progress: LoadProgress,
) -> str:
    """Load the weights, then quantize and pack them. Returns a description of their source."""
    offloaded: set[nn.Module] = set()
    if offload is not None:
        dtype = getattr(torch, spec.dtype)
        shrink = 1.0
        if spec.quantization:
            shrink = ONLINE[spec.quantization].bytes_per_weight / dtype.itemsize
        offloaded = offload.choose(list(model.model.layers), shrink)
    found, files, source = _tensors_of(model, spec, platform)
    wrapped, method = bool(spec.hf_config.get(WRAPPED)), spec.quantization
    accelerator, packs = is_accelerator(platform), "native" in platform.kernels
    stored = on_disk(stored_tensors(spec.path, spec.hf_config, spec.load.load_format))
    # Weights in files that will be packed are only mapped now: packing reads them.
    until = 0.1 if packs and files else 0.8
    found = progress.each("reading weights", found, lambda one: one[1].nbytes, stored, until)
    quantized = spec.stored
    others = OtherStages(model)
    found = (each for each in found if own_name(each[0], ()) not in others)
    if spec.pooling is not None:
        found = without_heads(found, spec.pooling)
    if quantized is not None:
        found = decoded(found, quantized, getattr(torch, spec.dtype))
    # Quantize each weight as it is loaded where its floats would take memory: the 16-bit model need not fit.
    decodes = quantized is not None and quantized.is_decoded
    on_loaded: Callable[[WeightRef], object] | None = WeightRef.convert if decodes else None
    if method and (accelerator or decodes):
        on_loaded = partial(quantize_weight, method=method, accelerator=accelerator)
    fill(model, found, platform.device, wrapped=wrapped, offloaded=offloaded, on_loaded=on_loaded)
    for module in model.modules():  # move buffers; weights are already on the device
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(platform.device))
    model.eval()
    if quantized is not None:
        convert_weights(_counted(progress, "converting weights", model, 0.8))
    if method is not None:
        quantize_weights(_counted(progress, "quantizing weights", model, 0.9), method, accelerator)
        online = ONLINE[method]
        about = online.on_accelerator if accelerator else online.on_cpu
        log.info("quantized %d weights to %s: %s", len(prepared_weights(model)), method, about)
    if packs:
        pack_weights(_counted(progress, "packing weights", model, 1.0))
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.join()
    if offload is not None:
        offload.install()
        model.capturable = model.movable = False
    if packs:
        # Only norms and the embedding table still use the mapped files.
        release_file_pages(files, (*model.parameters(), *model.buffers()))
    return source


def _tensors_of(
    model: CausalLM, spec: ModelSpec, platform: Platform
) -> tuple[Iterator[tuple[str, Tensor]], list[Path], str]:
    """The tensors, the files with them, and a description of these."""
    load_format, seed = spec.load.load_format, spec.options.seed
    if load_format == "dummy":
        found = random_tensors(model, seed, platform.device)
        return found, [], f"random weights (seed {seed})"
    kind, files = weight_files(spec.path, load_format)
    source = f"{len(files)} {load_format if load_format == 'npcache' else kind} file(s)"
    found = tensors(spec.path, load_format, spec.hf_config, spec.dtype, block_names(model))
    return found, files, source


def _counted(
    progress: LoadProgress, phase: str, model: nn.Module, until: float
) -> Iterator[WeightRef]:
    def size(ref: WeightRef) -> int:
        return sum(tensor.nbytes for tensor in ref.parameters().values())

    refs = weights_of(model)
    return progress.each(phase, refs, size, sum(map(size, refs)), until)


def _set_formats(model: nn.Module, spec: ModelSpec, accelerator: bool) -> None:
    """Prepare the layers for the tensors of a quantized checkpoint. The model is still on "meta"."""
    stored = spec.stored
    if stored is not None and stored.kinds_in_file:
        if not accelerator and spec.quantization is None:
            found = stored_tensors(spec.path, spec.hf_config, spec.load.load_format)
            kinds = {} if isinstance(found, int) else {name: kind for name, kind, _ in found}
            set_block_formats(model, kinds)
    elif stored is not None:
        count = set_formats(model, stored, spec.quantization, accelerator)
        about = stored.describe(accelerator, spec.quantization)
        log.info("%d weights are quantized: %s", count, about)


def _drop_wide_windows(model: CausalLM, max_model_len: int) -> None:
    """Remove windows that no request can exceed: the layer then frees no blocks that its window has passed."""
    for layer in model.attention_layers():
        if layer.spec.window is not None and layer.spec.window >= max_model_len:
            layer.spec = replace(layer.spec, window=None)


# ------------------------------------------------------------------------------------ fill


def fill(
    model: CausalLM,
    found: Iterable[tuple[str, Tensor]],
    device: torch.device,
    *,
    wrapped: bool = False,
    offloaded: Collection[nn.Module] = (),
    on_loaded: Callable[[WeightRef], object] | None = None,
) -> None:
    """Put each (name, tensor) pair into its slot, once. Parts of a weight stay deferred until `Layer.join`.

    `wrapped`: the checkpoint is a wrapper, whose other parts are skipped. `offloaded`: layers whose weights stay on the
    host. `on_loaded`: called with each unquantized weight as soon as it is complete.

    Raises:
        ConfigError: tensors are missing, have other shapes, or belong to the decoder but fit no slot.
    """
    slots, others = slots_of(model), OtherStages(model)
    filled: set[str] = set()
    heads: dict[str, Tensor] = {}  # the LM head of a checkpoint whose config.json ties it
    unexpected: list[str] = []
    unused: list[str] = []
    scales = 0
    complete = _CompleteWeights()
    named = (own for each in found for own in model.checkpoint_tensors(*each))
    for called, tensor in named:
        name = own_name(called, slots)
        if name in slots:
            slot = slots[name]
            slot.fill(tensor, HOST if slot.layer in offloaded else device, called)
            filled.add(name)
            if on_loaded is not None:
                for ref in complete.completed_by(slot):
                    on_loaded(ref)
        elif name in others:
            continue
        elif name == "lm_head.weight":
            heads[name] = tensor
        elif UNUSED.search(name):
            scales += name.endswith(("_scale", "_zero_point"))
        elif not (is_nothing(name, tensor) or model.ignores(name)):
            of_decoder = of_the_decoder(name, others.total)
            (unexpected if of_decoder else unused).append(called)
    if scales:
        log.info(
            "%d scales of activations or keys and values are not used: they are dynamic", scales
        )
    _resolve_tied_head(model, slots, filled, heads, device)
    if missing := missing_tensors(slots, filled):
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} of the tensors that config.json requires: {_some(missing)}"
            + (
                f"; unexpected tensors: {_some(unexpected + unused)}"
                if unexpected or unused
                else ""
            )
        )
    if unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that {type(model).__name__} does not use:"
            f" {_some(unexpected)};"
            " if config.json is correct, --model-impl transformers may run it"
        )
    if unused:
        (log.info if wrapped else log.warning)(
            "%d tensors of the checkpoint are not used: %s", len(unused), _some(unused)
        )


class _CompleteWeights:
    """Tracks which unquantized weights are complete, by counting elements."""

    def __init__(self) -> None:
        self.num_missing: dict[WeightRef, int] = {}

    def completed_by(self, slot: Slot) -> Iterator[WeightRef]:
        """Count this slot's tensor; the weights that it completes."""
        for each in slot.targets():
            ref = each.ref
            if not isinstance(ref, WeightRef):
                continue
            if not (ref.format is UNQUANTIZED or ref.format.gives_floats):
                continue
            numbers = sum(p.numel() for p in ref.parameters().values())
            self.num_missing[ref] = self.num_missing.get(ref, numbers) - math.prod(each.own_shape())
            if self.num_missing[ref] == 0:
                yield ref


def _resolve_tied_head(
    model: CausalLM,
    slots: dict[str, Slot],
    filled: set[str],
    heads: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Handle a head in the checkpoint of a tied model: if it differs from the embeddings, it replaces the tied head."""
    table = heads.get("lm_head.weight")
    if table is None:
        return
    table_layer = model.model.embed_tokens
    embeddings = next(name for name, slot in slots.items() if slot.layer is table_layer)
    if embeddings not in filled:
        slots[embeddings].fill(table, device, "lm_head.weight")
        filled.add(embeddings)
        return
    if model.lm_head is None:
        return
    own = table_layer.get_parameter("weight")
    part = table[table_layer.first :][: len(own)]
    if torch.equal(part.to(device=own.device, dtype=own.dtype), own):
        return
    log.warning(
        "config.json ties the head to the embeddings, but the checkpoint has a separate head, which is used"
    )
    with construction(own.dtype):
        model.lm_head = model.head(model.cfg, None)
    model.lm_head.slots("lm_head")["lm_head.weight"].fill(table, device, "lm_head.weight")


def missing_tensors(slots: Mapping[str, Slot], filled: set[str]) -> list[str]:
    """Names of tensors that are missing. A parameter is complete with one whole tensor, or with all of its parts."""
    by_parameter: dict[tuple[int, str], list[str]] = {}
    for name, slot in slots.items():
        for each in slot.targets():
            by_parameter.setdefault((id(each.layer), each.name), []).append(name)
    missing = []
    for names in by_parameter.values():
        is_optional: bool = slots[names[0]].optional
        if is_optional and filled.isdisjoint(names):
            continue
        whole = [name for name in names if slots[name].dim is None]
        if filled.isdisjoint(whole):
            parts = [name for name in names if slots[name].dim is not None] or whole[:1]
            missing += [name for name in parts if name not in filled]
    return list(dict.fromkeys(missing))


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")
