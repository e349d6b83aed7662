"""What Quire knows of a checkpoint's audio tower, from its JSON files alone: which token stands for sound, and sizes.

Knows config.json of wrappers, and the families whose sound is computed exactly (`[audio]` of families.toml). Whisper has no such
tower (`sound.py`). Imports neither torch nor Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import env
from quire.config.engine import Resolved
from quire.models.json_files import read_object
from quire.models.registry import FAMILIES
from quire.models.wrapper_config import language_config, why_no_towers, wrapper_config
from quire.protocol.media import AUDIO
from quire.protocol.tensor_data import ITEMSIZE

FAMILY: dict[str, dict[str, Any]] = FAMILIES["audio"]
REFUSED: dict[str, str] = FAMILIES["audio_refused"]
TOWERS = ("audio_config", "encoder_config")
ADAPTER_CONFIG = "adapter_config.json"
TOKENS = ("audio_token_id", "audio_token_index")
STATES_A_SECOND = 50
WINDOW_S = 30
"""Seconds that a tower of Whisper's form hears, where the files do not say."""


@dataclass(frozen=True, slots=True)
class AudioModel:
    """An audio tower whose sound Quire takes.

    Attributes:
        architecture: of the wrapper, in Transformers.
        token_id: the token of the prompt that stands for one row of the tower.
        placeholder: what stands for sound in a prompt's text, for chat templates that do not write it; empty: this token.
        seconds: of the longest sound that the tower hears whole; 0: any.
        max_rows: rows of the longest sound.
        width: features of a row.
        read_as: the token that its tokens are where layers look them up; None: they are what they are.
        tower_width: of the tower's widest layer and its hidden states together, for one state.
    """

    architecture: str
    token_id: int
    placeholder: str
    seconds: float
    max_rows: int
    width: int
    read_as: int | None
    tower_width: int

    @property
    def most_seconds(self) -> float:
        """Of a sound in a request."""
        return most_seconds(self.seconds)

    def activation_bytes(self, dtype: str) -> int:
        """An estimate of the memory that encoding the longest sound takes."""
        return int(self.most_seconds * STATES_A_SECOND) * self.tower_width * ITEMSIZE[dtype]


def most_seconds(tower_s: float) -> float:
    server_s = float(env.get("MAX_AUDIO_DECODE_DURATION_S"))
    return min(tower_s or server_s, server_s)


def audio_model(resolved: Resolved) -> AudioModel | None:
    """The audio tower that requests can use; None: there is none (`why_no_audio` says why)."""
    return None if why_no_audio(resolved) else _read(resolved)


def why_no_audio(resolved: Resolved) -> str:
    """Why this server's model hears no sound in prompts, as a sentence with the remedy; empty: it does."""
    config = wrapper_config(resolved)
    kind = str(config.get("model_type", ""))
    if why := REFUSED.get(kind):
        return f"sound for {kind} is not supported: {why}; send text, or serve a model that hears ({', '.join(FAMILY)})"
    if _tower(config) is None or kind not in FAMILY:
        return f"this model takes no sound in prompts: send text, or serve a model that hears ({', '.join(FAMILY)})"
    if not resolved.config.media.max_sounds:
        return "this server takes no sound (--limit-mm-per-prompt or --language-model-only): send text"  # fmt: skip
    needs_adapter = has_own_adapter(resolved) and AUDIO not in resolved.config.lora.default_mm_loras
    if needs_adapter and not (Path(resolved.path) / ADAPTER_CONFIG).is_file():
        return (
            f"this model hears with a LoRA adapter, and the checkpoint has no {ADAPTER_CONFIG}: download it again, or name"
            " the adapter (--enable-lora --default-mm-loras '{\"audio\": PATH}')"
        )
    return why_no_towers(resolved, "sound files")


def has_own_adapter(resolved: Resolved) -> bool:
    """Whether config.json says that a LoRA adapter of the checkpoint is active beside sound."""
    config = wrapper_config(resolved)
    key = FAMILY.get(str(config.get("model_type", "")), {}).get("adapter")
    return key is not None and bool(config.get(key, True))


def _tower(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((config[name] for name in TOWERS if isinstance(config.get(name), Mapping)), None)


def _read(resolved: Resolved) -> AudioModel:
    config = wrapper_config(resolved)
    family = FAMILY[str(config["model_type"])]
    tower, text = _tower(config) or {}, language_config(config)
    given = (config.get(name) for name in TOKENS)
    token = next((id for id in given if id is not None), family["token_id"])
    seconds = _window(resolved.path) if family.get("window") else float(family.get("seconds", 0))
    rows = math.ceil(most_seconds(seconds) * family["rows"]) + 1
    names = config.get("architectures") or [""]
    hidden = int(tower.get("hidden_size") or tower.get("d_model") or tower.get("hidden_dim") or 1280)  # fmt: skip
    inner = int(tower.get("intermediate_size") or tower.get("encoder_ffn_dim") or 4 * hidden)
    return AudioModel(
        architecture=str(family.get("architecture") or names[0]),
        token_id=int(token),
        placeholder=str(family.get("placeholder", "")),
        seconds=seconds,
        max_rows=min(rows, resolved.config.model.max_model_len or rows),
        width=int(text.get("hidden_size") or resolved.hf_config.get("hidden_size") or 4096),
        read_as=int(text.get("pad_token_id") or 0) if family.get("pads") else None,
        tower_width=8 * hidden + 3 * inner,
    )


def _window(path: str) -> float:
    """Seconds that Whisper's feature extractor hears at once."""
    return float(read_object(Path(path) / "preprocessor_config.json").get("chunk_length") or WINDOW_S)  # fmt: skip
