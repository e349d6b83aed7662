"""The names of a checkpoint's tensors: with wrappers around the text model, of no use, or of other stages of a pipeline.

Knows names. Does not know which tensor fills which parameter (`layers/weight_slots.py`).
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from torch import Tensor

from quire.models.base import CausalLM
from quire.parallel.stages import ONE_STAGE

WRAPPERS = re.compile(r"^(?:thinker\.)?(?:model\.)?(?:language_model|text_model|llm)\.|^thinker\.(?=model\.|lm_head\.)")  # fmt: skip
"""The prefixes that wrapper checkpoints put before the names of their text model."""

UNUSED = re.compile(
    r"\.(?:rotary_emb\.inv_freq|attn\.(?:masked_)?bias"
    r"|(?:[qkv]|kv|prob_output)_(?:scale|zero_point)"
    r"|(?:input|output)_(?:global_)?(?:scale|zero_point)|weight_shape|(?:activation|input)_scale_ub)$"
)
"""Tensors that are recomputed (rotary buffers, masks), and scales of caches and activations, which are not used."""


def own_name(called: str, slots: Container[str]) -> str:
    """The tensor's name in a text model without a wrapper."""
    if called in slots:
        return called
    name = WRAPPERS.sub("", called)
    # Saved without an LM head.
    if name.startswith(("layers.", "embed_tokens.", "norm.")) or f"model.{name}" in slots:
        name = f"model.{name}"
    return name


def is_nothing(name: str, tensor: Tensor) -> bool:
    """Whether it is a bias of zeros, which GPTQ tools write for every layer."""
    return name.endswith("_proj.bias") and not tensor.any()


def of_the_decoder(name: str, num_layers: int) -> bool:
    """Whether the decoder would compute something else without it. (Not of layers that config.json cuts off.)"""
    if layer := re.match(r"(?:model|backbone)\.layers\.(\d+)\.", name):
        return int(layer[1]) < num_layers
    return name.startswith(("model.embed_tokens.", "model.norm.", "lm_head."))


class OtherStages:
    """The names of tensors that other stages of the pipeline have, and this stage's model does not. Empty without stages."""

    def __init__(self, model: CausalLM):
        decoder, inner = model.model, _renamed(model, "model")
        self.total = getattr(decoder.layers, "total", len(decoder.layers))
        stage = getattr(decoder, "stage", ONE_STAGE)  # an encoder has none
        self.has_others = stage.layout.pipeline > 1
        if not self.has_others:
            return
        self.own = stage.layers(self.total)
        self.layers = f"{inner}.{_renamed(decoder, 'layers')}.".removeprefix(".")
        absent = [
            f"{inner}.{_renamed(decoder, name)}."
            for name in ("embed_tokens", "norm")
            if getattr(decoder, name) is None
        ]
        if model.lm_head is None and not (model.cfg.tie_word_embeddings and stage.is_first):
            absent.append(f"{_renamed(model, 'lm_head')}.")
        self.absent = tuple(path.removeprefix(".") for path in absent)

    def __contains__(self, name: str) -> bool:
        if not self.has_others:
            return False
        if name.startswith(self.layers):
            number = name[len(self.layers) :].partition(".")[0]
            return number.isdigit() and int(number) < self.total and int(number) not in self.own
        return name.startswith(self.absent)


def _renamed(module: Any, name: str) -> str:
    """The name of a module's part in checkpoints."""
    renamed: str = getattr(module, "checkpoint_names", {}).get(name, name)
    return renamed
