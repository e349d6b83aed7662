"""LoadConfig: how weights are read from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "gguf", "sharded_state", "dummy", "hf")

SAME_LOAD_FORMATS = {
    "fastsafetensors": "safetensors",
    "runai_streamer": "safetensors",
    "runai_streamer_sharded": "sharded_state",
    "bitsandbytes": "auto",
    "mistral": "safetensors",
}
"""vLLM's other readers of the same files -> Quire's format. Quire maps files: it needs no reader that is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Files of the checkpoint."""

    load_format: str = "auto"
    """auto (also: hf), safetensors (fastsafetensors, runai_streamer), sharded_state, pt, npcache, gguf, mistral (params.json,
    consolidated*.safetensors) or dummy (random weights). bitsandbytes: as --quantization bitsandbytes."""
    mmproj: str | None = None
    """GGUF file with the vision tower of a GGUF model; unset: the file mmproj*.gguf beside the model's file, if there is one that fits."""
    download_dir: str | None = None
    """Directory for files downloaded from the hub; unset: the hub's cache."""
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the load format."""
    ignore_patterns: list[str] = field(default_factory=lambda: ["original/**/*"])
    """Patterns of files in a hub repository not to download."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while loading weights."""
