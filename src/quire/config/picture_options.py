"""Options of a picture's processing (`mm_processor_kwargs`): the known keys, each within bounds.

Flat keys, or keys of `images_kwargs` and `videos_kwargs`, which take precedence. Knows names and numbers; the process that has the
model's processor says which of the names the model knows (`frontend/media/media_process.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MOST_FRAMES = 768
MOST_PIXELS = 1 << 28
NUMBERS: dict[str, tuple[float, float]] = {
    "min_pixels": (1, MOST_PIXELS), "max_pixels": (1, MOST_PIXELS), "min_patches": (1, 64), "max_patches": (1, 64),
    "max_soft_tokens": (1, 4096), "pan_and_scan_min_crop_size": (1, 1 << 16), "pan_and_scan_max_num_crops": (1, 16),
    "pan_and_scan_min_ratio_to_activate": (1, 100), "num_frames": (1, MOST_FRAMES),
}  # fmt: skip
SWITCHES = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
SIZES = ("size", "max_image_size")
SIDES = ("shortest_edge", "longest_edge", "height", "width", "min_pixels", "max_pixels")
SCOPES = ("images_kwargs", "videos_kwargs")
KEYS = (*NUMBERS, *SWITCHES, *SIZES)


def picture_options(value: Any) -> dict[str, Any]:
    """Flat keys.

    Raises:
        ValueError: another form, an unknown key, or a value out of bounds.
    """
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError('must be a JSON object such as {"max_pixels": 602112}')
    flat = {key: item for key, item in value.items() if key not in SCOPES}
    for scope in SCOPES:
        inner = value.get(scope) or {}
        if not isinstance(inner, Mapping):
            raise ValueError(f"{scope} must be a JSON object")
        flat = merged(flat, inner)
    return {key: _checked(key, item) for key, item in flat.items() if item is not None}


def merged(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both; of a key in both the later, and of a size each of its sides."""
    found = {**first, **later}
    for key in SIZES:
        if isinstance(old := first.get(key), Mapping) and isinstance(new := later.get(key), Mapping):  # fmt: skip
            found[key] = {**old, **new}
    return found


def _checked(key: Any, value: Any) -> Any:
    if key in SWITCHES and isinstance(value, bool):
        return value
    if key in NUMBERS:
        least, most = NUMBERS[key]
        whole = key != "pan_and_scan_min_ratio_to_activate"
        right = type(value) is int or (type(value) is float and not whole)
        if right and least <= value <= most:
            return value
        raise ValueError(f"{key} must be a {'whole ' * whole}number from {least} to {most}")
    if key in SIZES:
        if isinstance(value, Mapping) and value and all(
            side in SIDES and type(n) is int and 1 <= n <= MOST_PIXELS for side, n in value.items()
        ):  # fmt: skip
            return dict(value)
        raise ValueError(f"{key} must be a JSON object with whole numbers from 1 to {MOST_PIXELS} of {', '.join(SIDES)}")  # fmt: skip
    if key in SWITCHES:
        raise ValueError(f"{key} must be true or false")
    raise ValueError(f"unknown key {str(key)[:40]!r}; the keys are {', '.join(KEYS)}")
