"""What Quire knows of a checkpoint's encoder of sound, from its JSON files alone.

Knows config.json, and the files beside it. Imports neither torch nor Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.engine import Resolved
from quire.models.json_files import read_object

TRANSCRIBERS = ("WhisperForConditionalGeneration",)
RATE = 16_000
"""Samples a second of all these models."""
HOP = 160
"""Samples between two frames of a spectrogram."""


@dataclass(frozen=True, slots=True)
class Transcriber:
    """A model that writes down speech.

    Attributes:
        mels: bins of a spectrogram.
        states: that the encoder makes of a window of sound, one for two frames.
        width: features of a state.
        tower_width: of the encoder's widest layer and its hidden states together.
        generation: generation_config.json.
        multilingual: whether it has languages and translates; None: the file does not say.
    """

    mels: int
    states: int
    width: int
    tower_width: int
    generation: Mapping[str, Any] = field(default_factory=dict)
    multilingual: bool | None = None

    @property
    def frames(self) -> int:
        return 2 * self.states

    @property
    def samples(self) -> int:
        """Of a window."""
        return self.frames * HOP

    @property
    def seconds(self) -> float:
        """Of a window."""
        return self.samples / RATE


def transcriber(resolved: Resolved) -> Transcriber | None:
    """What this server transcribes with; None: its model is for something else."""
    if resolved.architecture not in TRANSCRIBERS:
        return None
    config = resolved.hf_config
    file = read_object(Path(resolved.path) / "generation_config.json")
    width, inner = int(config["hidden_size"]), int(config["encoder_ffn_dim"])
    says = file.get("is_multilingual")
    return Transcriber(
        int(config["num_mel_bins"]), int(config["max_source_positions"]), width, 8 * width + 3 * inner,
        file, says if isinstance(says, bool) else None,
    )  # fmt: skip


def has_parts(resolved: Resolved) -> bool:
    """Whether ranks have some heads or layers each, so that none records the attention that times of words need."""
    parallel = resolved.config.parallel
    return max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1
