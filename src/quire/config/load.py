"""LoadConfig: how weights are read from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Checkpoints."""

    load_format: str = "auto"
    """auto, safetensors, pt, npcache or dummy."""
    download_dir: str | None = None
    """Where hub files are kept; unset: the hub's own cache."""
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of one load format."""
    ignore_patterns: list[str] = field(default_factory=lambda: ["original/**/*"])
    """Files of a hub repository that are not fetched."""
    use_tqdm_on_load: bool = True
    """Show progress while reading weights."""
