"""LoadConfig: how weights are read from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Files of the checkpoint."""

    load_format: str = "auto"
    """auto (also: hf), safetensors, pt, npcache or dummy (random weights)."""
    download_dir: str | None = None
    """Directory for files downloaded from the hub; unset: the hub's cache."""
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the load format."""
    ignore_patterns: list[str] = field(default_factory=lambda: ["original/**/*"])
    """Patterns of files in a hub repository not to download."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while loading weights."""
