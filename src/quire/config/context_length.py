"""How long a text a model was made for, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = (
    "max_position_embeddings",  # most
    "n_positions",  # GPT-2
    "max_seq_len",  # MPT, DBRX
    "seq_length",  # ChatGLM
    "model_max_length",  # Command-R, Baichuan
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
)

COUNTED = ("su", "longrope", "llama3", "mrope", "default", "proportional")
"""Kinds of rotary scaling where the length in config.json is the scaled one already."""

LEARNED = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "biogpt", "xglm", "codegen", "openai-gpt")
"""Model types with a table of positions: beyond its end there is nothing to look up."""

WITHOUT_ANY = 2048
"""For a config.json that names no length."""


def model_length(config: Mapping[str, Any]) -> tuple[int, str]:
    """(tokens, the key that says so): the least of the keys there are, times the rotary scaling.

    The key is empty where config.json has none.
    """
    lengths = {
        key: config[key] for key in KEYS if isinstance(config.get(key), int) and config[key] > 0
    }
    if not lengths:
        return WITHOUT_ANY, ""
    key = min(lengths, key=lambda k: lengths[k])
    length = lengths[key]
    rope = rope_scaling(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    if kind in COUNTED or not isinstance(factor, (int, float)) or factor <= 1:
        return length, f"{key}={length}"
    if kind == "yarn":
        # The factor counts from the length before scaling; max_position_embeddings may be either.
        original = rope.get("original_max_position_embeddings") or length
        return max(int(original * factor), length), f"{key}={length}, yarn factor {factor:g}"
    if "gemma3" in str(config.get("model_type", "")):
        return length, f"{key}={length}"
    return int(length * factor), f"{key}={length}, {kind} factor {factor:g}"


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary scaling in either dialect; empty where there is none, or one for each kind of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {}
    return rope


def learned_positions(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in LEARNED
