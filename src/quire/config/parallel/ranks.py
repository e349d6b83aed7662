"""What several ranks cannot serve: refused before anything is loaded, with the remedy.

Knows the configuration and config.json. Does not know layers: what only they show, `worker/memory_forecast.py` refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire import env
from quire.config.model_sizes import model_size
from quire.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from quire.config.engine import Resolved

VARIABLE = "PP_LAYER_PARTITION"
PARTITION = f"QUIRE_{VARIABLE}"


def layer_partition(stages: int) -> tuple[int, ...]:
    """The number of layers of each stage of a pipeline, if QUIRE_PP_LAYER_PARTITION gives them; else nothing.

    Raises:
        ConfigError: it does not name a number for each stage.
    """
    text = env.get(VARIABLE)
    if stages == 1 or not text:
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if min(counts, default=0) < 1 or len(counts) != stages:
        raise ConfigError(
            f"{PARTITION}={text}: pipeline_parallel_size={stages} needs {stages} numbers of layers, each at least 1, such as"
            f" {','.join(['8'] * stages)}"
        )
    return counts


def check_ranks(resolved: Resolved) -> None:
    """Raises ConfigError, Unsupported: several ranks cannot have this model, or serve with these features."""
    _check_heads(resolved)
    layer_partition(resolved.config.parallel.pipeline_parallel_size)
    _check_blocks(resolved)
    for name in (
        "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
    ):  # fmt: skip
        if (size := getattr(resolved.config.parallel, name)) > 1:
            _refuse(resolved, name, size)


def _check_heads(resolved: Resolved) -> None:
    size = resolved.config.parallel.tensor_parallel_size
    heads = model_size(resolved.hf_config, "num_attention_heads", size)  # size: it has none
    if heads % size:
        nearest = max(n for n in range(1, size) if heads % n == 0)
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {heads} attention heads of {resolved.architecture}; use {nearest}"
        )


def _check_blocks(resolved: Resolved) -> None:
    """Raises ConfigError, Unsupported: the ranks that would keep a part of the blocks each do not have the same KV heads."""
    sizes, config = resolved.config.parallel, resolved.hf_config
    tensor, prefill = sizes.tensor_parallel_size, sizes.prefill_context_parallel_size
    size = sizes.decode_context_parallel_size
    if size == 1:
        return
    about = f"decode_context_parallel_size={size}"
    if resolved.config.speculation.speculative_config:
        raise Unsupported(f"{about} with --speculative-config", "use 1")
    heads = model_size(config, "num_attention_heads", 1)
    kv_heads = 1 if config.get("kv_lora_rank") else model_size(config, "num_key_value_heads", heads)
    copies = max(1, tensor // kv_heads)
    allowed = {1, *(prefill * n for n in range(1, copies + 1) if copies % n == 0)}
    if size not in allowed:
        nearest = max(n for n in allowed if n < size)
        raise ConfigError(
            f"{about}: with tensor_parallel_size={tensor}, prefill_context_parallel_size={prefill} and {kv_heads} KV heads it can be"
            f" {' or '.join(map(str, sorted(allowed)))}; use {nearest}, or a larger tensor_parallel_size"
        )


def _refuse(resolved: Resolved, name: str, size: int) -> None:
    config, about = resolved.config, f"{name}={size}"
    parts = name == "prefill_context_parallel_size"
    refused = {
        f"{about} on {resolved.device}": resolved.device != "cpu",
        f"{about} with --speculative-config": parts and bool(config.speculation.speculative_config),
        f"{about} with --model-impl transformers": config.model.model_impl == "transformers",
    }
    for what, is_given in refused.items():
        if is_given:
            raise Unsupported(what, f"use {name}=1")
