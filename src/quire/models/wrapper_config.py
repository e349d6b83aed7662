"""config.json of a wrapper: a language model with towers for pictures or sound. Imports neither torch nor Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.engine import Resolved
from quire.config.resolve import overridden
from quire.models.hf_config import NESTS
from quire.models.json_files import read_object

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def wrapper_config(resolved: Resolved) -> dict[str, Any]:
    """config.json; of a model that also speaks (Qwen-Omni), the part that hears, sees and writes."""
    config = read_object(Path(resolved.path) / "config.json")
    config = overridden(config, resolved.config.model.hf_overrides or {})
    thinker = config.get("thinker_config")
    return dict(thinker) if isinstance(thinker, Mapping) else config


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the language model inside; the whole, where its values are beside the tower's."""
    return next((config[name] for name in NESTS if isinstance(config.get(name), Mapping)), config)


def why_no_towers(resolved: Resolved, what: str) -> str:
    """Why this server loads no towers, as a sentence with the remedy. `what`: that they are for."""
    if resolved.pooling is not None and what != "pictures":
        return f"{what} for models that compute vectors are not supported yet: send text"
    parallel = resolved.config.parallel
    if max(parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return f"{what} need --pipeline-parallel-size 1 and --prefill-context-parallel-size 1: send text"
    if not any((Path(resolved.path) / name).is_file() for name in PROCESSOR_FILES):
        return f"the checkpoint has no {PROCESSOR_FILES[0]}, so {what} cannot be read: send text"
    return ""
