"""Loads a checkpoint's text model through Transformers, with as little else in memory as possible.

Knows the auto classes and the loader of Transformers. Does not know how the model will be run. A wrapper with
an image or sound tower loads as its language model alone if Transformers has a class for that; otherwise it
loads whole, and `model.py` drops what a text pass never uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from quire.config.engine import ModelSpec
from quire.errors import ConfigError, Unsupported
from quire.models.progress import LoadProgress
from quire.models.transformers.marker_embeddings import add_markers

NO_ADAPTER = {"subfolder": "no adapter"}
"""`adapter_kwargs` of a load: Transformers looks for adapters in this folder, not beside the weights, where it would find one that is
active only in some requests (`features/lora` serves it), and apply it to all."""

# Prefixes of the language model's names in wrapper checkpoints, and in its own class.
TEXT_NAMES = {
    r"^model\.language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^text_model\.": "model.",
}


def load(spec: ModelSpec, device: torch.device | str, progress: LoadProgress) -> PreTrainedModel:
    """The model with its weights, in eval mode, on `device`.

    Raises:
        ConfigError: the checkpoint lacks weights that the model needs, or has them in other shapes.
        Unsupported: Transformers has no text-generating class for this checkpoint.
    """
    config = wrapper = read_config(spec)
    dtype = getattr(torch, spec.dtype)
    _check_activation(config)
    model_class, config, renames = _class_of(config, spec)
    with quiet(progress):
        if spec.load.load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.options.seed)
                model = model_class._from_config(config, dtype=dtype)
        else:
            model = _read(model_class, config, renames, dtype, spec)
    add_markers(model, wrapper, spec)
    model = model.to(device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _check_activation(config: PreTrainedConfig) -> None:
    """Raises ConfigError: Transformers has no activation of this name."""
    text = config.get_text_config()
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(text, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise ConfigError(f"{key}={name[:80]!r} in config.json: Transformers has no activation of this name")  # fmt: skip


def read_config(spec: ModelSpec) -> PreTrainedConfig:
    """The checkpoint's config, wrapper included, with `hf_overrides` applied.

    Raises:
        ConfigError: Transformers does not know the model type, and the checkpoint's own code is not trusted.
    """
    options = spec.options
    try:
        config = AutoConfig.from_pretrained(
            spec.path,
            trust_remote_code=options.trust_remote_code,
            code_revision=options.code_revision,
        )
    except ValueError as error:
        raise ConfigError(
            f"Transformers {transformers.__version__} cannot read {spec.path}/config.json ({str(error).splitlines()[0]}); if"
            " the checkpoint contains Python code, --trust-remote-code runs it"
        ) from error
    overrides = options.hf_overrides
    if callable(overrides):
        changed = overrides(config)
        return changed if changed is not None else config
    if not overrides:
        return config
    return type(config).from_dict(_merged(config.to_dict(), overrides))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[name] = _merged(dict(old or {}), value) if both else value
    return result


def _is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, PreTrainedModel)


def _class_of(
    config: PreTrainedConfig, spec: ModelSpec
) -> tuple[type[PreTrainedModel], PreTrainedConfig, dict[str, str] | None]:
    """The class to build, its config, and how to rename the checkpoint's weights for it."""
    auto_map = getattr(config, "auto_map", None) or {}
    if spec.options.trust_remote_code and "AutoModelForCausalLM" in auto_map:
        found = transformers.dynamic_module_utils.get_class_from_dynamic_module(
            auto_map["AutoModelForCausalLM"],
            spec.path,
            code_revision=spec.options.code_revision,
        )
        return found, config, None
    text = config.get_text_config(decoder=True)
    if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        if found.config_class is type(text):
            quantization = getattr(config, "quantization_config", None)
            if quantization is not None:
                text.quantization_config = quantization
            # Some wrappers set tying in their own config, others in the text model's.
            text.tie_word_embeddings = bool(
                getattr(config, "tie_word_embeddings", False)
                or getattr(text, "tie_word_embeddings", False)
            )
            return found, text, TEXT_NAMES
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, None
    for name in getattr(config, "architectures", None) or [spec.architecture]:
        named: Any = getattr(transformers, name, None)
        if _is_model(named) and named.can_generate():
            return named, config, None
    raise Unsupported(
        f"{spec.architecture} ({config.model_type}) with Transformers {transformers.__version__}: "
        "it has no class that generates text",
        "if the checkpoint contains Python code, pass --trust-remote-code",
    )


def _read(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    renames: dict[str, str] | None,
    dtype: torch.dtype,
    spec: ModelSpec,
) -> PreTrainedModel:
    model, info = model_class.from_pretrained(
        spec.path,
        config=config,
        dtype=dtype,
        key_mapping=renames,
        output_loading_info=True,
        local_files_only=True,
        adapter_kwargs=NO_ADAPTER,
        use_safetensors={"safetensors": True, "pt": False}.get(spec.load.load_format),
    )
    for what, names in (
        ("lacks weights", info["missing_keys"]),
        ("has weights of other shapes", info["mismatched_keys"]),
        ("has weights that could not be converted", info.get("conversion_errors") or ()),
    ):
        if names:
            first = ", ".join(sorted(str(name) for name in names)[:5])
            raise ConfigError(
                f"the checkpoint in {spec.path} {what} for {model_class.__name__}: {first} "
                f"({len(names)} in all). Check that the download is complete and config.json belongs to it."
            )
    return model


@contextmanager
def quiet(progress: LoadProgress) -> Iterator[None]:
    """Count Transformers' load in `progress`, without its bars and load report: its problems are raised as errors above."""

    def counted(make: Any, args: Any, keywords: Any) -> Any:
        if keywords.get("desc") != "Loading weights":
            return make(*args, **keywords)
        return progress.each("reading weights", args[0], lambda _: 1, len(args[0]), 1.0, " tensors")

    logger = logging.getLogger("transformers")
    level = logger.level
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    hook = transformers.utils.logging.set_tqdm_hook(counted)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(hook)
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------- rope


def freeze_rope(model: nn.Module, max_model_len: int) -> list[str]:
    """Fix rotary frequencies that would depend on the longest request of a pass.

    Transformers chooses them by the largest position in a pass, so a request's values would depend on the other
    requests of the batch and change in the middle of its text. Here `max_model_len` decides, once.

    Returns:
        One clause for each kind of rope that was fixed to its long form.
    """
    clauses = []
    modules: list[Any] = list(model.modules())
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _moves(kinds):
            clauses.append(_freeze(module, kinds, None, max_model_len))
            module.rope_type = "frozen"
        elif isinstance(kinds, dict):
            for layer_type, kind in list(kinds.items()):
                if isinstance(kind, str) and _moves(kind):
                    clauses.append(_freeze(module, kind, layer_type, max_model_len))
                    kinds[layer_type] = "frozen"
    return sorted({clause for clause in clauses if clause})


def _moves(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _freeze(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> str:
    prefix = f"{layer_type}_" if layer_type else ""
    name = f"{prefix}inv_freq"
    parameters = module.config.rope_parameters
    parameters = parameters[layer_type] if layer_type else parameters
    short = parameters.get("original_max_position_embeddings") if kind == "longrope" else None
    short = int(short or module.original_max_seq_len)
    if max_model_len <= short:
        return ""
    seq_len = short + 1 if kind == "longrope" else max_model_len
    before = getattr(module, name)
    after, _scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, before.device, seq_len=seq_len, layer_type=layer_type
    )
    module.register_buffer(name, after.to(before), persistent=False)
    if kind == "longrope":
        return f"longrope uses its long factors for all requests (max_model_len {max_model_len} > {short})"
    return f"dynamic rope is scaled for {max_model_len} tokens for all requests"
