"""Sizes of a model, from its config.json, whatever the family's spelling of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""Most models' key -> all keys for the same size, the usual one first."""


def model_size(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """The size by its usual key; the maximum if layers differ; `default` if config.json does not have it."""
    spellings = SPELLINGS.get(name, (name,))
    size = next((config[key] for key in spellings if config.get(key)), default)
    return int(max(size) if isinstance(size, list | tuple) else size)
