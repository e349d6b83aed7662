"""What the machines of one engine, or of several engines behind one server, must have in common: versions, variables, flags
and the checkpoint.

Knows the configuration. Does not know how machines exchange these facts (`executor/control_port.py`). No torch here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from quire import env
from quire.config.engine import EngineConfig, Resolved
from quire.models.checkpoint_digest import checkpoint_digest
from quire.ops.cpu import isa
from quire.version import __version__

SECTIONS = ("model", "cache", "scheduler", "parallel", "load", "structured", "lora", "speculation")
LOCAL = {
    *"model tokenizer hf_token served_model_name chat_template generation_config".split(),
    *"lora_modules default_mm_loras allowed_lora_paths allow_lora_from_hub".split(),
    *"kv_disk_dir kv_disk_size kv_disk_write kv_remote_url kv_remote_ttl kv_key_file kv_transfer_config".split(),
    *"download_dir use_tqdm_on_load node_rank".split(),
    *"data_parallel_rank data_parallel_start_rank data_parallel_size_local".split(),
    *"distributed_executor_backend max_num_queued_reqs max_num_queued_tokens".split(),
}
"""Fields that may differ: paths, names, which engine it is, and what only the head uses."""
VARIABLES = ("CPU_ISA", "DEVICE", "PLUGINS", "PP_LAYER_PARTITION")
"""Variables that change what a rank computes."""


def node_fingerprint(resolved: Resolved, sections: Sequence[str] = SECTIONS) -> dict[str, str]:
    """Name -> value, of this machine, with the flags of these sections.

    Raises:
        ModelNotFound: the checkpoint has no weights.
    """
    usable = [each.name for each in isa.usable()]
    return {
        "the version of Quire": __version__,
        "the version of torch": importlib.metadata.version("torch"),
        "the architecture": resolved.architecture,
        "the device": resolved.device,
        "the dtype": resolved.dtype,
        "the instruction set of the CPU kernels": usable[0] if env.get("CPU_ISA") == "auto" else "as set",
        "the checkpoint (digest)": checkpoint_digest(resolved.path, resolved.config.load.load_format),
        **{f"QUIRE_{name}": str(env.get(name)) for name in VARIABLES},
        **_flags(resolved.config, sections),
    }  # fmt: skip


def _flags(config: EngineConfig, sections: Sequence[str]) -> dict[str, str]:
    return {
        f"--{field.name.replace('_', '-')}": _text(getattr(section, field.name))
        for section in (getattr(config, name) for name in sections)
        for field in fields(section)
        if field.name not in LOCAL
    }


def _text(value: Any) -> str:
    return str(getattr(value, "__qualname__", value))


def local_paths(resolved: Resolved) -> dict[str, str]:
    """Where this machine has what the configuration names: field of `Resolved` -> directory."""
    found = {"path": resolved.path, "tokenizer_path": resolved.tokenizer_folder}
    return found if resolved.draft is None else {**found, "draft": resolved.draft.path}
