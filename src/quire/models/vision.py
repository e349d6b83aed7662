"""What Quire knows of a checkpoint's vision tower, from its JSON files alone: which token stands for a picture, and sizes.

Knows config.json of wrappers, and the families whose pictures are computed exactly (`[vision]` of families.toml). Imports
neither torch nor Transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.engine import Resolved
from quire.models.json_files import read_object
from quire.models.registry import FAMILIES
from quire.models.wrapper_config import (
    PROCESSOR_FILES,
    language_config,
    why_no_towers,
    wrapper_config,
)
from quire.protocol.tensor_data import ITEMSIZE

FAMILY: dict[str, dict[str, Any]] = FAMILIES["vision"]
REFUSED: dict[str, str] = FAMILIES["vision_refused"]
TOWERS = ("vision_config", "vision_tower_config", "vit_config")
DEFAULT_PIXELS = 28 * 28 * 1280  # of a picture, where the files of a Qwen checkpoint do not say


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision tower whose pictures Quire takes.

    Attributes:
        architecture: of the wrapper, in Transformers.
        image_token_id: the token of the prompt that stands for one row of the tower.
        token: the token that stands for a picture in a prompt; empty: image_token_id.
        placeholder: what stands for a picture in a prompt's text, for chat templates that do not write it; empty: this token.
        has_grid: rotary positions of its tokens have three components, time, height and width.
        both_ways: its tokens attend to each other in both directions: in "all" layers, or only in those with "windows"; "prompt":
            all tokens of a prompt with pictures do, in all layers; empty: they do not.
        is_prefix: a prompt is its pictures, BOS, a text and a new line; what is written around the text is not the user's.
        inner_layers: of the tower, whose states the first layers of the language model take (DeepStack).
        read_as: the token that its tokens are where layers look them up; None: they are what they are.
        merge: rows and columns of patches that become one row of the tower.
        max_rows: rows of the largest picture, as far as the files say.
        max_patches: what the tower computes for it.
        video_token_id: what stands for a video in a prompt; None: the model takes none.
        video_row_id: the token of the prompt that stands for one row of a video.
        video_placeholder: as `placeholder`.
        tokens_per_second: positions of a second of a video; 0: one position from each group of frames to the next.
        width: features of a row.
        tower_width: of the tower's widest layer and its hidden states together, for one patch.
        native: Quire computes the tower (`vision_towers/`); else Transformers.
    """

    model_type: str
    architecture: str
    image_token_id: int
    token: str
    placeholder: str
    has_grid: bool
    both_ways: str
    is_prefix: bool
    inner_layers: int
    read_as: int | None
    merge: int
    max_rows: int
    max_patches: int
    video_token_id: int | None
    video_row_id: int | None
    video_placeholder: str
    tokens_per_second: float
    width: int
    tower_width: int
    native: bool

    def activation_bytes(self, dtype: str) -> int:
        """An estimate of the memory that encoding the largest picture takes."""
        return self.max_patches * self.tower_width * ITEMSIZE[dtype]


def vision_model(resolved: Resolved) -> VisionModel | None:
    """The vision tower that requests can use; None: there is none (`why_no_pictures` says why)."""
    return None if why_no_pictures(resolved) else _read(resolved)


def why_no_pictures(resolved: Resolved) -> str:
    """Why this server takes no pictures, as a sentence with the remedy; empty: it takes them."""
    config = wrapper_config(resolved)
    kind = str(config.get("model_type", ""))
    if not tower_config(config):
        return "this model reads text only: send text, or serve a model with a vision tower"
    if kind not in FAMILY:
        why = REFUSED.get(kind)
        reason = f": {why}" if why else " yet"
        return f"pictures for {kind} are not supported{reason} (they are for {', '.join(FAMILY)}); send text"
    media = resolved.config.media
    if not (media.max_pictures or media.enable_mm_embeds):
        return "this server takes no pictures (--limit-mm-per-prompt or --language-model-only): send text"
    if why := why_no_towers(resolved, "pictures"):
        return why
    if importlib.util.find_spec("PIL") is None:
        return "pictures need Pillow: pip install quire[vision]"
    return ""


def tower_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the vision tower in a wrapper; empty: there is none."""
    return next((config[name] for name in TOWERS if isinstance(config.get(name), Mapping)), {})


def _read(resolved: Resolved) -> VisionModel:
    config = wrapper_config(resolved)
    kind = str(config["model_type"])
    family = FAMILY[kind]
    tower = tower_config(config)
    names = config.get("architectures") or [""]
    merge = int(tower.get("spatial_merge_size") or 2) if family.get("grid") else 1
    token = config.get("image_token_id", config.get("image_token_index", family["token_id"]))
    text = language_config(config)
    width = int(text.get("hidden_size") or resolved.hf_config.get("hidden_size") or 4096)
    options = resolved.config.media.mm_processor_kwargs
    rows, patches = _sizes(family, config, tower, merge, image_settings(resolved.path) | options)
    hidden = int(tower.get("hidden_size") or tower.get("embed_dim") or 1024)
    inner = int(tower.get("intermediate_size") or 4 * hidden)
    both_ways = str(family.get("both_ways", ""))
    if text.get("use_bidirectional_attention") != family.get("both_ways_if", text.get("use_bidirectional_attention")):  # fmt: skip
        both_ways = ""
    video = config.get("video_token_id") if family.get("video") else None
    if video is not None:  # frames are made so small that a video fits into a step
        pooled = int(tower.get("pooling_kernel_size") or merge)
        patches = max(patches, resolved.max_num_batched_tokens * pooled**2)
    return VisionModel(
        model_type=kind,
        architecture=str(family.get("architecture") or names[0]),
        image_token_id=int(token),
        token=str(family.get("token", "")),
        placeholder=str(family.get("placeholder", "")),
        has_grid=bool(family.get("grid")),
        both_ways=both_ways,
        is_prefix=bool(family.get("prefix")),
        inner_layers=len(tower.get("deepstack_visual_indexes") or ()),
        read_as=int(text.get("pad_token_id") or 0) if family.get("pads") else None,
        merge=merge,
        max_rows=rows,
        max_patches=patches,
        video_token_id=None if video is None else int(video),
        video_row_id=video if video is None or not family.get("video_has_pictures") else int(token),
        video_placeholder=str(family.get("video", "")),
        tokens_per_second=float(tower.get("tokens_per_second", 4)) if family.get("timed") else 0.0,
        width=width,
        tower_width=8 * hidden + 3 * inner,
        native=_is_native(family, tower),
    )


def _is_native(family: Mapping[str, Any], tower: Mapping[str, Any]) -> bool:
    given = family.get("native", False)
    return given if isinstance(given, bool) else tower.get("model_type") in given


def _sizes(
    family: Mapping[str, Any],
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    merge: int,
    settings: Mapping[str, Any],
) -> tuple[int, int]:
    """(rows, patches) of the largest picture. `settings`: of the image processor."""
    patch = _side(tower.get("patch_size", 14))
    if family.get("grid"):
        rows = _most_pixels(settings) // (patch * merge) ** 2
        return rows, rows * merge**2
    side = _side(tower.get("image_size", 336)) // patch
    if fixed := config.get("mm_tokens_per_image"):
        return int(fixed), side**2
    if most := family.get("tokens"):
        rows = int(config.get("vision_soft_tokens_per_image") or most)
        rows = int(settings.get("max_soft_tokens") or rows)
        return rows, rows * int(tower.get("pooling_kernel_size") or 1) ** 2
    ratio = config.get("downsample_ratio") or tower.get("pixel_shuffle_ratio") or 1
    shrink = int(config.get("scale_factor") or round(1 / ratio))
    shrink = int(config.get("spatial_merge_size") or shrink)
    tiles = int(family.get("tiles", 1))
    if tiles > 1 and (most := settings.get("max_patches")):
        tiles = int(most) + 1
    line_ends = (
        side + 1 if tiles > 1 else 1
    )  # at most one token for each line of a tile, and one for the tile
    return tiles * (side**2 // shrink**2 + line_ends), family.get("encoded_tiles", tiles) * (
        side**2 + 1
    )


def image_settings(path: str) -> dict[str, Any]:
    """Of the checkpoint's image processor."""
    says = read_object(Path(path) / PROCESSOR_FILES[0])
    return dict(says or read_object(Path(path) / PROCESSOR_FILES[1]).get("image_processor") or {})


def _most_pixels(says: Mapping[str, Any]) -> int:
    size = says.get("size")
    largest = (
        size.get("longest_edge", size.get("max_pixels")) if isinstance(size, Mapping) else None
    )
    return int(says.get("max_pixels") or largest or DEFAULT_PIXELS)


def _side(size: Any) -> int:
    """Of a square, from a number or a list."""
    return int(size[0] if isinstance(size, list) else size)
