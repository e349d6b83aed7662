"""The tiles of a picture for Llama 4. Transformers' own class computes them with torchvision, whose builds fit one build of torch each.

The picture is fitted into the canvas of tiles that keeps most of its pixels, and padded with black at the right and below; if there
are several tiles, the whole picture follows as one more. Values are rounded as bfloat16 rounds them, as the model was trained.

Shape suffixes: P tiles, C channels, H, W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Size = tuple[int, int]
"""(height, width)"""
SETTINGS: Mapping[str, Any] = {
    "size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False, "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
"""Where preprocessor_config.json leaves them out."""


class Llama4Pictures:
    """As an image processor of Transformers. `settings`: of preprocessor_config.json."""

    class valid_kwargs:
        size: dict[str, int]
        max_patches: int
        resize_to_max_canvas: bool

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = {**SETTINGS, **{name: settings[name] for name in SETTINGS if name in settings}}  # fmt: skip

    def fetch_images(self, images: Sequence[Any]) -> Sequence[Any]:
        """The same: nothing is fetched here."""
        return images

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """The tiles of all pictures, `pixel_values`, float32 [P, C, H, W]; and of each `aspect_ratios`: rows and columns of tiles.

        Raises ValueError: tiles are not square, or there are none.
        """
        own = {name: options.get(name, value) for name, value in self.settings.items()}
        found = [tiles_of(np.asarray(image), own) for image in images]
        return {
            "pixel_values": np.concatenate([pixels_PCHW for pixels_PCHW, _ in found]),
            "aspect_ratios": [grid for _, grid in found],
        }


def tiles_of(pixels_HWC: np.ndarray, own: Mapping[str, Any]) -> tuple[np.ndarray, Size]:
    """(pixels_PCHW, rows and columns of tiles). `own`: as `SETTINGS`. Raises ValueError: as `Llama4Pictures`."""
    side, most = int(own["size"]["height"]), int(own["max_patches"])
    if side != own["size"]["width"] or side < 1 or most < 1:
        raise ValueError(f"tiles of the size {own['size']}, at most {most}")
    to_most = bool(own["resize_to_max_canvas"])
    canvas = best_canvas(pixels_HWC.shape[:2], side, most, to_most)
    inside = fitted(pixels_HWC.shape[:2], canvas, None if to_most else side)
    whole_HWC = np.zeros((*canvas, 3), np.uint8)
    whole_HWC[: inside[0], : inside[1]] = resized(pixels_HWC, inside)
    rows, columns = canvas[0] // side, canvas[1] // side
    tiles = whole_HWC.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)  # fmt: skip
    if rows * columns > 1:
        tiles = np.concatenate([tiles, resized(pixels_HWC, (side, side))[None]])
    levels = [level_values(own["rescale_factor"], *each) for each in zip(own["image_mean"], own["image_std"], strict=True)]  # fmt: skip
    return np.stack([values[tiles[..., c]] for c, values in enumerate(levels)], 1), (rows, columns)


def best_canvas(size: Size, side: int, most: int, to_most: bool) -> Size:
    """Of all grids of at most `most` tiles: one that is as large as the picture and no larger than needed, else the largest; with
    `to_most`, the largest. Of equal ones, that with the fewest tiles."""
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]  # fmt: skip
    sides = np.float32(side) * np.array(grids, np.float32)
    scales = (sides / np.array(size, np.float32)).min(1)
    larger = scales[scales >= 1]
    scale = scales.max() if to_most or not len(larger) else larger.min()
    rows, columns = min((rows * columns, rows, columns) for (rows, columns), own in zip(grids, scales, strict=True) if own == scale)[1:]  # fmt: skip
    return rows * side, columns * side


def fitted(size: Size, canvas: Size, largest: int | None) -> Size:
    """The size of a picture inside a canvas; no side grows beyond `largest`, if it is given."""
    # Sides of the canvas are float32, as in Transformers, so that the same are rounded down.
    limits: list[Any] = [
        np.float32(limit) if largest is None or limit < max(own, largest) else max(own, largest)
        for own, limit in zip(size, canvas, strict=True)
    ]
    by_height, by_width = limits[0] / size[0], limits[1] / size[1]
    if by_width < by_height:
        found = min(math.floor(size[0] * by_width), int(limits[0])), int(limits[1])
    else:
        found = int(limits[0]), min(math.floor(size[1] * by_height), int(limits[1]))
    return max(found[0], 1), max(found[1], 1)


def resized(pixels_HWC: np.ndarray, size: Size) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(pixels_HWC).resize(size[::-1], Image.Resampling.BILINEAR))


def level_values(factor: float, mean: float, std: float) -> np.ndarray:
    """What each of the 256 levels of a channel becomes: float32."""
    scaled = as_bfloat16(np.arange(256, dtype=np.float32) * np.float32(factor))
    rounded = as_bfloat16(np.array([mean, std], np.float32))
    return as_bfloat16(as_bfloat16(scaled - rounded[0]) / rounded[1])


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 numbers, rounded to the nearest of bfloat16; of two, to the even one."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
