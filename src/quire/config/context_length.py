"""The context length of a model, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = (
    "max_position_embeddings",  # most models
    "n_positions",  # GPT-2
    "max_seq_len",  # MPT, DBRX
    "seq_length",  # ChatGLM
    "model_max_length",  # Command-R, Baichuan
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
)

COUNTED = ("su", "longrope", "llama3", "mrope", "default", "proportional")
"""Types of rotary scaling with which the length in config.json already includes the scaling."""

AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
"""Model types whose table of learned positions begins after the row of padding."""

LEARNED = (
    *("gpt2", "gpt_neo", "gpt_bigcode", "opt", "biogpt", "xglm", "codegen", "openai-gpt"),
    *("bert", "distilbert", "whisper", *AFTER_PADDING),
)
"""Model types with a table of learned positions: no position exists beyond its end."""

WITHOUT_ANY = 2048
"""The length if config.json gives none."""


def model_length(config: Mapping[str, Any]) -> tuple[int, str]:
    """(tokens, text that names the key): the smallest value of KEYS, times the rotary scaling.

    The text is empty if config.json has none of KEYS.
    """
    lengths = {
        key: config[key] for key in KEYS if isinstance(config.get(key), int) and config[key] > 0
    }
    if not lengths:
        return WITHOUT_ANY, ""
    key = min(lengths, key=lambda k: lengths[k])
    length = lengths[key]
    if config.get("model_type") in AFTER_PADDING:
        padding = config.get("pad_token_id")
        unused = (padding if isinstance(padding, int) and padding >= 0 else 1) + 1
        return max(length - unused, 1), f"{key}={length}, of which {unused} are for padding"
    rope = rope_scaling(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    if kind in COUNTED or not isinstance(factor, (int, float)) or factor <= 1:
        return length, f"{key}={length}"
    if kind == "yarn":
        # The factor applies to the length before scaling; max_position_embeddings may be either length.
        original = rope.get("original_max_position_embeddings") or length
        return max(int(original * factor), length), f"{key}={length}, yarn factor {factor:g}"
    if "gemma3" in str(config.get("model_type", "")):
        return length, f"{key}={length}"
    return int(length * factor), f"{key}={length}, {kind} factor {factor:g}"


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary scaling under its new or old key; empty if there is none, or one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {}
    return rope


def learned_positions(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in LEARNED
