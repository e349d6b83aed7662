"""params.json as config.json: dense Mistral and Ministral, and Mixtral.

Knows the keys of params.json. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, Unsupported
from quire.models.json_files import read_json

MAX_BYTES = 1 << 20  # of a params.json

KEYS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""Key of params.json -> key of config.json; each is a whole number."""

OPTIONAL = {
    "head_dim": "head_dim", "n_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
DEFAULT_LENGTH = 128_000  # as vLLM
REFUSED = {
    "kv_lora_rank": "latent attention", "whisper_model_args": "an audio encoder", "causal": "attention to later tokens",
    "ada_rms_norm_t_cond": "norms that depend on a delay",
}  # fmt: skip
REMEDY = "serve the Hugging Face files of the same repository (config.json, model*.safetensors)"


def read_params(file: Path) -> dict[str, Any]:
    """config.json of a checkpoint with this params.json.

    Raises:
        ConfigError: the file is damaged. Unsupported: a model or a quantization that is not known.
    """
    found = read_json(file, MAX_BYTES)
    try:
        return _config(found)
    except Unsupported as why:
        raise Unsupported(f"{file} ({why})", REMEDY) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{file} is not a Mistral model's: {error!r:.200}") from None


def _config(params: Mapping[str, Any]) -> dict[str, Any]:
    for key, what in REFUSED.items():
        if params.get(key) or (params.get("multimodal") or {}).get(key):
            raise Unsupported(f"{key}: {what}", REMEDY)
    config: dict[str, Any] = {"dtype": "bfloat16", "sliding_window": None}
    for key, name in KEYS.items():
        if type(value := params[key]) is not int or value < 1:
            raise ValueError(f"{key}={value!r} is no positive number")
        config[name] = value
    config |= {name: params[key] for key, name in OPTIONAL.items() if params.get(key) is not None}
    lengths = (params.get(key) for key in LENGTHS)
    config["max_position_embeddings"] = next(filter(None, lengths), DEFAULT_LENGTH)
    kind, architecture = "mistral", "MistralForCausalLM"
    if moe := params.get("moe"):
        kind, architecture = "mixtral", "MixtralForCausalLM"
        config["num_local_experts"] = int(moe["num_experts"])
        config["num_experts_per_tok"] = int(moe["num_experts_per_tok"])
    if (scaling := params.get("llama_4_scaling")) is not None:
        kind, architecture = "ministral3", "Ministral3ForCausalLM"
    if rope := _rope(params.get("yarn"), scaling):
        config["rope_parameters"] = {"rope_theta": config.get("rope_theta", 10000.0), **rope}
    _add_window(config, params.get("sliding_window") or params.get("_sliding_window"))
    if quantization := params.get("quantization"):
        config["quantization_config"] = _quantization(quantization)
    if params.get("vision_encoder"):
        config["quire_wrapper"] = "a model with a vision encoder"
    return {"architectures": [architecture], "model_type": kind, **config}


def _rope(yarn: Mapping[str, Any] | None, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    if yarn:
        length = int(yarn["original_max_position_embeddings"])
        rope = {
            "rope_type": "yarn",
            "factor": float(yarn["factor"]),
            "original_max_position_embeddings": length,
        }
        rope |= {"beta_fast": float(yarn["beta"]), "beta_slow": float(yarn["alpha"])}
        if not yarn.get("apply_scale", True):  # equal: attention is not scaled
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if scaling:
        rope = {"rope_type": "default", **rope, "llama_4_scaling_beta": float(scaling["beta"])}
        rope.setdefault("original_max_position_embeddings", int(scaling["original_max_position_embeddings"]))  # fmt: skip
    return rope


def _add_window(config: dict[str, Any], window: Any) -> None:
    """A number for all layers, or a list that repeats, of which None sees all tokens."""
    if not isinstance(window, list):
        config["sliding_window"] = window
        return
    sizes = {size for size in window if size is not None}
    if len(sizes) != 1 or None in window:
        raise Unsupported(f"sliding_window={window}", REMEDY)
    config["sliding_window"] = sizes.pop()


def _quantization(says: Mapping[str, Any]) -> dict[str, Any]:
    if "quant_method" in says:
        return dict(says)
    if says.get("qformat_weight") != "fp8_e4m3":
        raise Unsupported(f"quantization={dict(says)!r:.100}", REMEDY)
    return {"quant_method": "fp8", "activation_scheme": "static"}
