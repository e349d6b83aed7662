"""The identity of cached keys and values: everything but the tokens that determines their bits.

It is the first parent of all block hashes, so blocks of engines that differ in any of this have different names. Knows the
configuration and what workers report. The content of the weights is not here: to read all of it takes seconds, so the stores
of kept blocks add it (features/kv_tiers/weights_digest.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from quire.config.engine import ModelSpec, Resolved
from quire.ops.cpu import isa
from quire.ops.cpu.build import file_name
from quire.version import __version__
from quire.worker.worker_info import WorkerInfo

FORMAT = "1"
"""Of these facts, and of the order of bytes in a block."""
ROPES_BY_TOKEN = {"default", "linear", "llama3", "yarn", "proportional", "mrope"}
"""Kinds of rope whose angles at a position depend on nothing else. Those of other kinds may depend on max_model_len."""
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


def kv_facts(resolved: Resolved, info: WorkerInfo) -> dict[str, str]:
    """Name -> value, of this engine."""
    usable = [each for each in isa.usable() if resolved.device == "cpu"]
    facts = {
        "format": FORMAT,
        "quire": __version__,
        "torch": importlib.metadata.version("torch"),
        "architecture": resolved.architecture,
        "model code": info.model_impl,
        "config": _digest(_of_model(resolved.spec)),
        "dtype": resolved.dtype,
        "kv_cache_dtype": resolved.kv_dtype,
        "quantization": str(resolved.quantization),
        "block_size": str(resolved.block_size),
        "hash": resolved.config.cache.hash_algorithm,
        "layers": _digest(info.specs),
        "device": resolved.device,
        "attention": str(resolved.attention_backend),
        "kernels": file_name(usable[0]) if usable else "",
    }
    if _rope_kinds(resolved.hf_config) - ROPES_BY_TOKEN:
        facts["max_model_len"] = str(info.max_model_len)
    if (draft := resolved.draft_spec) is not None:
        facts["drafter"] = _digest(_of_model(draft))
    return facts


def digest_of(facts: Mapping[str, str]) -> str:
    """Of all these facts, as 32 hexadecimal digits."""
    return _digest(sorted(facts.items()))


def _of_model(spec: ModelSpec) -> Any:
    config = {key: value for key, value in spec.hf_config.items() if key not in NOT_OF_THE_MODEL}
    return spec.architecture, spec.dtype, str(spec.quantization), config


def _rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """The kinds of rope that config.json names, for all layers or by kind of layer."""
    kinds: set[str] = set()
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key)
        for one in (found, *found.values()) if isinstance(found, dict) else ():
            kind = one.get("rope_type", one.get("type")) if isinstance(one, dict) else None
            kinds.update((str(kind),) if kind else ())
    return kinds


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
