"""The LoRA adapter that is part of a checkpoint, and active only in requests with sound (Granite-Speech 3).

It is served as any other: by the name of the kind of media that it belongs to (`default_mm_loras`). Knows config.json and
adapter_config.json. Imports neither torch nor Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.config.engine import Resolved
from quire.config.lora import LoraConfig
from quire.config.validate import check_lora
from quire.logging import get_logger
from quire.models.audio_tower import ADAPTER_CONFIG, has_own_adapter, why_no_audio
from quire.models.json_files import read_object
from quire.protocol.media import AUDIO

log = get_logger(__name__)


def with_own_adapter(resolved: Resolved) -> Resolved:
    """The configuration that serves the adapter of the checkpoint beside sound, if it has one and this server takes sound.

    Raises:
        ConfigError: an adapter of the configuration has its name.
    """
    given = resolved.config.lora
    if AUDIO in given.default_mm_loras or not has_own_adapter(resolved) or why_no_audio(resolved):
        return resolved
    rank = _largest_rank(read_object(Path(resolved.path) / ADAPTER_CONFIG))
    lora = _beside(given, resolved.path, rank)
    config = replace(resolved.config, lora=lora)
    check_lora(config)
    log.info("requests with sound use the adapter of the checkpoint (rank %d), under the name %s", rank, AUDIO)  # fmt: skip
    return replace(resolved, config=config)


def _beside(given: LoraConfig, path: str, rank: int) -> LoraConfig:
    """With the adapter of the checkpoint, for which the limits of the user's adapters have one place more."""
    if not given.enable_lora:
        return replace(given, enable_lora=True, default_mm_loras={AUDIO: path}, max_loras=1, max_lora_rank=rank)  # fmt: skip
    return replace(
        given,
        default_mm_loras={**given.default_mm_loras, AUDIO: path},
        max_loras=given.max_loras + 1,
        max_cpu_loras=None if given.max_cpu_loras is None else given.max_cpu_loras + 1,
        max_lora_rank=max(given.max_lora_rank, rank),
    )


def _largest_rank(config: Mapping[str, object]) -> int:
    """Of all modules. A wrong value is refused when the adapter is read."""
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    return max([1, *(rank for rank in ranks if isinstance(rank, int))])
