"""What a model takes beside text: pictures and videos (`vision.py`), and sound (`audio_tower.py`). Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.engine import Resolved
from quire.models.audio_tower import AudioModel, audio_model, why_no_audio
from quire.models.vision import VisionModel, vision_model, why_no_pictures
from quire.protocol.media import AUDIO, IMAGE, VIDEO


@dataclass(frozen=True, slots=True)
class MediaModel:
    """The towers of a checkpoint that requests can use; at least one."""

    vision: VisionModel | None
    audio: AudioModel | None

    @property
    def towers(self) -> list[VisionModel | AudioModel]:
        return [one for one in (self.vision, self.audio) if one is not None]

    @property
    def architecture(self) -> str:
        """Of the wrapper, in Transformers."""
        return self.towers[0].architecture

    @property
    def native(self) -> bool:
        """Quire computes the towers (`vision_towers/`); else Transformers."""
        return self.audio is None and self.vision is not None and self.vision.native

    @property
    def width(self) -> int:
        """Features of a row."""
        return self.towers[0].width

    @property
    def read_as(self) -> int | None:
        """See `VisionModel`."""
        return self.towers[0].read_as

    @property
    def max_rows(self) -> int:
        """Rows of the largest item."""
        return max(one.max_rows for one in self.towers)

    @property
    def has_grid(self) -> bool:
        """See `VisionModel`."""
        return self.vision is not None and self.vision.has_grid

    @property
    def both_ways(self) -> str:
        """See `VisionModel`."""
        return "" if self.vision is None else self.vision.both_ways

    @property
    def inner_layers(self) -> int:
        """See `VisionModel`."""
        return 0 if self.vision is None else self.vision.inner_layers


def media_model(resolved: Resolved) -> MediaModel | None:
    """None: the model takes text only, or this server does."""
    found = MediaModel(vision_model(resolved), audio_model(resolved))
    return found if found.towers else None


def why_no_media(resolved: Resolved) -> Mapping[str, str]:
    """By kind: why this server takes none, as a sentence with the remedy; empty: it takes them."""
    pictures = why_no_pictures(resolved)
    return {IMAGE: pictures, VIDEO: pictures, AUDIO: why_no_audio(resolved)}


def most_rows(resolved: Resolved, model: MediaModel) -> int:
    """Rows that the encoder cache holds, and that one item may have."""
    return max(resolved.max_num_batched_tokens, model.max_rows)
