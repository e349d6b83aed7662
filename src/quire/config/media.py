"""MediaConfig: pictures in requests: how many, from where, and what is kept of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from quire.config.number_types import Amount

KINDS = ("image", "video", "audio", "vision_chunk")
MOST = 999


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaConfig:
    """Pictures in requests."""

    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """Maximum number of pictures in a request, such as {"image": 4} (or image=4); 0: the vision tower is not loaded."""
    language_model_only: bool = False
    """Serve only the text model of a multimodal checkpoint: the vision tower is not loaded."""
    allowed_local_media_path: str = ""
    """Directory from which every client may read pictures, as `file://` URLs; unset: none."""
    allowed_media_domains: list[str] = field(default_factory=list)
    """Hosts from which pictures may be fetched, also if their addresses are private; unset: every host with public addresses."""
    mm_processor_cache_gb: Amount = 4
    """GiB of processed pictures that all HTTP processes together keep for later requests; 0: none."""
    disable_chunked_mm_input: bool = False
    """Compute all tokens of a picture in one step."""

    @property
    def max_pictures(self) -> int:
        """The most pictures of a request."""
        return 0 if self.language_model_only else self.limit_mm_per_prompt.get("image", MOST)


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
