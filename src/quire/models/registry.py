"""Registry of native models, and the choice between them and the Transformers backend. Does not import torch.

To add a model: a class in `models/`, a line in `families.toml`, a case in `tests/models/cases.py`. From outside the
package: `register("MyForCausalLM", "my_package.module:MyModel")`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

FAMILIES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))

MODELS = {name: f"quire.models.{target}" for name, target in FAMILIES["architectures"].items()}
"""Architecture of config.json -> "module:Class"."""

MTP = {target: f"MTP of {target}" for target in FAMILIES["mtp"]}
"""Architecture of a target -> the name of its MTP layers' class."""
SPECULATORS = {name: f"quire.models.{target}" for name, target in FAMILIES["speculators"].items()}
SPECULATORS |= {MTP[name]: f"quire.models.{target}" for name, target in FAMILIES["mtp"].items()}
"""Name of a speculator's model -> "module:Class". No config.json has these names (`speculators/spec.py` sets them)."""

ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
LAYER_TYPES = {name: frozenset(types) for name, types in FAMILIES["layer_types"].items()}
"""Architecture -> the entries of `layer_types` in config.json that its class has besides ATTENTION_TYPES.

A class whose layers have recurrent states is listed even if its config.json has no `layer_types`; so is one whose KV cache
config.json does not show plainly. The memory plan constructs it, without weights.
"""

NATIVE = ("quire", "vllm", "native")
IMPLS = ("auto", *NATIVE, "transformers")
ENCODERS = ("quire.models.encoder:", "quire.models.mpnet:")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def register(architecture: str, target: str) -> None:
    """Register a model class: "module:Class". A later registration of an architecture replaces the earlier one."""
    if target.count(":") != 1:
        raise ConfigError(f"model {architecture}: {target!r} is not of the form module:Class")
    MODELS[architecture] = target


def class_path(architecture: str) -> str:
    """The "module:Class" of a native model."""
    return SPECULATORS.get(architecture) or MODELS[architecture]


def choose_impl(
    architecture: str, hf_config: Mapping[str, Any], model_impl: str = "auto"
) -> tuple[str, str]:
    """("native" or "transformers", why).

    Raises:
        ConfigError: model_impl is unknown, or requires a native model that does not exist.
    """
    if model_impl not in IMPLS:
        raise ConfigError(f"model_impl={model_impl!r}: choose from {', '.join(IMPLS)}")
    if architecture in SPECULATORS:
        return "native", "it is a speculator"
    if model_impl == "transformers":
        return "transformers", "selected by model_impl"
    lacking = _lacking(architecture, hf_config)
    if not lacking:
        return "native", f"{architecture} has a native model"
    if model_impl in NATIVE:
        raise ConfigError(
            f"model_impl={model_impl}: {lacking}; use auto to run it through Transformers"
        )
    return "transformers", lacking


def has_states(architecture: str, hf_config: Mapping[str, Any], model_impl: str) -> bool:
    """Whether the model is native, and only its layers show which states and KV cache it has."""
    return architecture in SPECULATORS or (
        architecture in LAYER_TYPES
        and choose_impl(architecture, hf_config, model_impl)[0] == "native"
    )


def _lacking(architecture: str, config: Mapping[str, Any]) -> str:
    """Why the native model cannot run this checkpoint; empty: it can."""
    if architecture not in MODELS:
        return f"{architecture} has no native model"
    if not MODELS[architecture].startswith("quire."):
        return ""  # a registered model checks its own config
    layer_types = LAYER_TYPES.get(architecture, frozenset())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_type = [value for value in rope.values() if isinstance(value, Mapping)]
    for each in by_type or [rope]:
        kind = each.get("rope_type") or each.get("type") or "default"
        if kind not in (*ROPE_TYPES, "su", "mrope"):
            return f"rope type {kind!r} has no native implementation"
    odd = set(config.get("layer_types") or ()) - ATTENTION_TYPES - layer_types
    if odd:
        return f"layers of type {', '.join(sorted(odd))} have no native implementation"
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    acts: tuple[str, ...] = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
    if MODELS[architecture].startswith(ENCODERS):
        acts = (*acts, "gelu_new", "gelu_fast", "relu")
    if act not in acts:
        return f"activation {act!r} has no native implementation"
    if config.get("use_bidirectional_attention") in (True, "all"):
        return "attention to later tokens has no native implementation"
    return ""
