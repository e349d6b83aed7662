"""MediaConfig: pictures, videos and sound in requests: how many, from where, and what is kept of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.config.number_types import Amount
from quire.config.picture_options import MOST_FRAMES

KINDS = ("image", "video", "audio", "vision_chunk")
MOST = 999
NUM_FRAMES = 32
AS_READ: dict[str, Any] = {"image_mode": ("RGB",), "rgba_background_color": ([255, 255, 255], (255, 255, 255))}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaConfig:
    """Pictures, videos and sound in requests."""

    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """Maximum number of pictures, videos and sounds in a request, such as {"image": 4, "audio": 2} (or image=4,audio=2); 0: their tower is not loaded."""
    language_model_only: bool = False
    """Serve only the text model of a multimodal checkpoint: no tower is loaded."""
    allowed_local_media_path: str = ""
    """Directory from which every client may read pictures, videos and sound, as `file://` URLs; unset: none."""
    allowed_media_domains: list[str] = field(default_factory=list)
    """Hosts from which pictures, videos and sound may be fetched, also if their addresses are private; unset: every host with public addresses."""
    mm_processor_cache_gb: Amount = 4
    """GiB of processed pictures, videos and sound that all HTTP processes together keep for later requests; 0: none."""
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    """How files are read: {"video": {"num_frames": 32}} takes at most 32 frames of a video, at even distances."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """How pictures are resized and cut, such as {"max_pixels": 602112}; instead of the values in the checkpoint's preprocessor_config.json."""
    trust_request_mm_kwargs: bool = False
    """Allow requests over HTTP to send mm_processor_kwargs and media_io_kwargs."""
    enable_mm_embeds: bool = False
    """Take embeddings in the place of pictures. With a limit of 0 pictures the vision tower is not loaded."""
    interleave_mm_strings: bool = False
    """Where a chat template takes texts only, put placeholders of pictures where their parts are, not before the text of the message."""
    disable_chunked_mm_input: bool = False
    """Compute all tokens of a picture, a video or a sound in one step."""
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"
    """With tensor parallelism each rank has the whole vision tower; weights: and encodes every picture; data: a part of a step's pictures."""

    @property
    def num_frames(self) -> int:
        """The most frames that are taken of a video."""
        given = self.media_io_kwargs.get("video", {}).get("num_frames", NUM_FRAMES)
        return int(self.mm_processor_kwargs.get("num_frames", given))

    @property
    def max_pictures(self) -> int:
        """The most pictures of a request."""
        return self._most("image")

    @property
    def max_videos(self) -> int:
        """The most videos of a request."""
        return self._most("video")

    @property
    def max_sounds(self) -> int:
        """The most sounds of a request."""
        return self._most("audio")

    def _most(self, kind: str) -> int:
        return 0 if self.language_model_only else int(self.limit_mm_per_prompt.get(kind, MOST))


def media_reading(value: Any) -> dict[str, Any]:
    """{"video": {"num_frames": N}}.

    Raises:
        ValueError: another form.
    """
    value = json.loads(value) if isinstance(value, str) else value
    must = f'must be {{"video": {{"num_frames": N}}}} with N from 1 to {MOST_FRAMES}; files are read in one way otherwise'
    if not isinstance(value, dict) or value.keys() - {"video", "image"}:
        raise ValueError(must)
    image = value.get("image", {})
    if not isinstance(image, dict) or any(image[key] not in AS_READ.get(key, ()) for key in image):
        raise ValueError(f"{must} (pictures become RGB, on white where they are transparent)")
    video = value.get("video", {})
    if not isinstance(video, dict) or video.keys() - {"num_frames"}:
        raise ValueError(must)
    count = video.get("num_frames", NUM_FRAMES)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MOST_FRAMES:
        raise ValueError(must)
    return value


def media_limits(value: Any) -> dict[str, int]:
    """By kind. Forms: {"image": 4}, {"image": {"count": 4, "width": 512}}, "image=4,video=1".

    Raises:
        ValueError: another form.
    """
    must = f'must be a JSON object with numbers of {", ".join(KINDS)}, such as {{"image": 4}}'
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        value = {
            kind: n for kind, _, n in (part.partition("=") for part in value.split(",") if part)
        }
    elif isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError(must)
    found = {}
    for kind, limit in value.items():
        count = limit.get("count", MOST) if isinstance(limit, dict) else limit
        if kind not in KINDS or not str(count).isdecimal():
            raise ValueError(must)
        found[kind] = int(count)
    return found
