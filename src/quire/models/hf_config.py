"""Reads the config.json of a checkpoint: one set of names for all dialects.

Knows the spellings of config.json. Does not know torch, layers or weights.

Dialects: Transformers 4 (`rope_theta` beside `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, maybe one
for each kind of layer, `dtype`); text models alone or inside a wrapper for images and sound (`text_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.resolve import overridden
from quire.errors import ConfigError, ModelNotFound
from quire.models.json_files import read_json, read_object
from quire.models.registry import FAMILIES


def read_config(path: str, overrides: Any = None) -> dict[str, Any]:
    """config.json with `hf_overrides` applied; of a wrapper, the config of its text model.

    Raises:
        ModelNotFound: there is no config.json. ConfigError: it is not a JSON object, or its rope entry is malformed.
    """
    file = Path(path) / "config.json"
    config = read_object(file)
    if not config and not file.exists():
        raise ModelNotFound(f"{file} does not exist")
    found = text_config(overridden(_with_quantization(config, Path(path)), overrides or {}))
    check_sizes(found)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(found.get(key) or {}, Mapping):
            raise ConfigError(
                f"{key}={found[key]!r} in config.json or hf_overrides: this is an object such as"
                " {'rope_type': 'linear', 'factor': 2.0}"
            )
    return found


MAX_SIZES = {
    "num_hidden_layers": 4096,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}
"""Over ten times the values of the largest models: a higher value means damage, and startup would take forever."""


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raises ConfigError: a value is too large for any model, or is a text."""
    for key, maximum in MAX_SIZES.items():
        value = config.get(key)
        if isinstance(value, str):
            raise ConfigError(
                f"{key}={value[:80]!r} in config.json or hf_overrides: this is a number, without quotation marks"
            )
        if isinstance(value, int | float) and not -1 <= value <= maximum:
            raise ConfigError(
                f"{key}={value!r} in config.json or hf_overrides: at most {maximum} is allowed; the file may be damaged"
            )


BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which older tools wrote what belongs under `quantization_config`, and their quant_method."""


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    if any(config.get(key) for key in ("quantization_config", "compression_config")):
        return config
    for name, method in BESIDE.items():
        if isinstance(says := read_json(folder / name), dict):
            return {**config, "quantization_config": {"quant_method": method, **says}}
    return config


NESTS = ("text_config", "language_config", "llm_config", "thinker_config")

TEXT_ARCHITECTURES: dict[str, str] = FAMILIES["nested"]
"""model_type of a nested text model -> the architecture of the same model without a wrapper."""

WRAPPED = "quire_wrapper"
"""Key of a nested text config: the wrapper's architecture. The loader then drops its name prefixes."""


FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Wrappers whose published config.json has the text model's values beside vision_config -> model_type of that model."""


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of such a wrapper with a text_config; any other as it is."""
    kind = FLAT.get(str(config.get("model_type")))
    if kind is None or "text_config" in config or "vision_config" not in config:
        return config
    own = ("architectures", "model_type", "vision_config")
    inner = {key: value for key, value in config.items() if key not in own}
    outer = {key: config[key] for key in own if key in config}
    return {**outer, "text_config": {**inner, "model_type": kind}}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model inside a wrapper; the same config if there is no wrapper.

    Takes what describes the whole checkpoint (dtype, end tokens, quantization, tied head) from the wrapper if the
    text model does not set it.
    """
    config = _nested(config)
    renamed = DECODERS.get(str(config.get("model_type")), {})
    config = {**config, **{usual: config[own] for own, usual in renamed.items() if own in config}}
    nest = next((key for key in NESTS if isinstance(config.get(key), Mapping)), None)
    if nest is None:
        return dict(config)
    outer = {key: value for key, value in config.items() if key != nest}
    inner = text_config(config[nest])
    merged = dict(inner)
    for key in (
        *("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "vocab_size"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        *("is_encoder_decoder", "classifier_from_token", "method"),
    ):
        if merged.get(key) is None and outer.get(key) is not None:
            merged[key] = outer[key]
    # The head belongs to the wrapper, so its tie_word_embeddings counts.
    if outer.get("tie_word_embeddings"):
        merged["tie_word_embeddings"] = True
    if FAMILIES["vision"].get(outer.get("model_type"), {}).get("both_ways") == "prompt":
        merged.pop("use_bidirectional_attention", None)  # only prompts with pictures do
    wrapper = list(outer.get("architectures") or [])
    alone = TEXT_ARCHITECTURES.get(str(inner.get("model_type")))
    merged["architectures"] = (
        [alone] if alone else wrapper or list(inner.get("architectures") or [])
    )
    merged[WRAPPED] = wrapper[0] if wrapper else str(outer.get("model_type", ""))
    defaults = DEFAULTS.get(_family(str(inner.get("model_type"))), {})
    return {**{key: defaults[key] for key in SIZES if key in defaults}, **merged}


DECODERS: dict[str, dict[str, str]] = FAMILIES["decoders"]
"""model_type of an encoder with a decoder -> key for the decoder in config.json -> the usual key."""

DEFAULTS: dict[str, dict[str, Any]] = FAMILIES["defaults"]
"""By model_type ("all" for all): the values of absent keys."""
SPELLINGS: dict[str, str] = FAMILIES["spellings"]
"""Key of some families' config.json -> the key of the others."""


EXPERT_COUNTS = ("num_local_experts", "n_routed_experts")
"""Other names of `num_experts`."""


SIZES = (
    *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "max_position_embeddings",
)
"""Keys that published wrappers leave out of their text model's config (Gemma 3)."""

LAYER_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LAYER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Letters of `hybrid_override_pattern`, and old names of layers -> entries of `layer_types`."""


class TextConfig:
    """config.json of a text model as attributes, with one spelling per name and with defaults filled in.

    An attribute that the file does not have raises ConfigError (also an AttributeError, so `getattr` with a
    default works).
    """

    def __init__(self, config: Mapping[str, Any]):
        kind = str(config.get("model_type", ""))
        values = {**DEFAULTS["all"], **DEFAULTS.get(_family(kind), {}), **config}
        for own, usual in SPELLINGS.items():
            if config.get(own) is not None:
                values[usual] = config[own]
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values.get("num_attention_heads")
        if values.get("kv_lora_rank"):  # latent attention rotates these features of a head
            values["head_dim"] = values["qk_rope_head_dim"]
        if values.get("head_dim") is None and values.get("hidden_size"):
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        experts = (values.get(key) for key in ("num_experts", *EXPERT_COUNTS))
        values["num_experts"] = next((count for count in experts if count is not None), None)
        pattern = values.get("sliding_window_pattern")
        if values.get("layer_types") is None and pattern:
            period = pattern if isinstance(pattern, int) else len(pattern)
            kinds = ["full_attention", *["sliding_attention"] * (period - 1)]
            layers = range(1, values["num_hidden_layers"] + 1)
            values["layer_types"] = [kinds[min(i % period, 1)] for i in layers]
        values["hidden_act"] = values.get("hidden_activation") or values["hidden_act"]
        values["dtype"] = str(values.get("dtype") or values.get("torch_dtype") or "float32")
        values["rope_parameters"] = rope_parameters(values)
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.values[name]
        except KeyError:
            raise MissingField(f"config.json has no {name!r}, which this model needs") from None

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def rope(self, layer: int) -> dict[str, Any]:
        """The rotary parameters of a layer: of its type in `layer_types`, if types have their own.

        Raises:
            ConfigError: its type has none.
        """
        parameters: dict[str, Any] = self.values["rope_parameters"]
        if "rope_type" in parameters:
            return parameters
        kind = self.layer_types[layer]
        if kind not in parameters:
            raise ConfigError(
                f"config.json's rope_parameters have none for layers of type {kind!r}"
            )
        return dict(parameters[kind])

    def layer_type(self, layer: int) -> str:
        """What `layer_types` says of a layer, or the pattern or the interval in its place."""
        if types := self.get("layer_types"):
            return LAYER_KINDS.get(types[layer], types[layer])
        if pattern := self.get("hybrid_override_pattern"):
            return LAYER_LETTERS[pattern[layer]]
        whole = (layer + 1) % self.full_attention_interval == 0
        return "full_attention" if whole else "linear_attention"

    def window(self, layer: int) -> int | None:
        """The window of this layer, by `layer_types`, else by Qwen's rule; None: it sees all tokens."""
        window = self.get("sliding_window")
        if types := self.get("layer_types"):
            return window if types[layer] == "sliding_attention" else None
        above = layer >= self.get("max_window_layers", 0)
        return window if self.get("use_sliding_window") and above else None


class MissingField(ConfigError, AttributeError):
    """config.json lacks a value that the model needs."""


def _family(kind: str) -> str:
    """qwen3_vl_text -> qwen3: a text model inside a wrapper has the defaults of its family."""
    return str(FAMILIES["same_defaults"].get(kind, kind))


ROPE_NAMES = {"su": "longrope", "mrope": "default"}
"""Old names. For text alone the three positions of mrope are equal, so it is the default type."""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of either dialect: {"rope_type", "rope_theta", ...}, or a dict of these by layer type."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    types = set(config.get("layer_types") or ())
    types |= {"full_attention", "sliding_attention", "chunked_attention"}
    base = config.get("rope_local_base_freq") or config.get("rope_theta")
    by_type = {"sliding_attention": {**config, "rope_theta": base}}
    if parameters and set(parameters) <= types:
        return {
            kind: _one_rope(by_type.get(kind, config), value or {})
            for kind, value in parameters.items()
            if value is not None
        }
    if config.get("windows_unscaled"):
        windowed = _one_rope(by_type["sliding_attention"], {})
        return {"full_attention": _one_rope(config, parameters), "sliding_attention": windowed}
    return _one_rope(config, parameters)


def _one_rope(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    rope = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    rope["rope_type"] = ROPE_NAMES.get(kind, kind)
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    elif config.get("rotary_dim") and config.get("head_dim"):  # MiniMax M2
        rope.setdefault("partial_rotary_factor", config["rotary_dim"] / config["head_dim"])
    # Phi-3 writes the original length beside the parameters, and there that value counts.
    trained = config.get("original_max_position_embeddings")
    longest = config.get("max_position_embeddings")
    if trained:
        rope["original_max_position_embeddings"] = trained
    else:
        rope.setdefault("original_max_position_embeddings", longest)
    rope.setdefault("max_position_embeddings", longest)
    return rope
