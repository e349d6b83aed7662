"""Tiles of pictures for Llama 4: the sizes and values that Transformers 5.24 computes with torchvision 0.28, written down."""

from __future__ import annotations

import numpy as np
import pytest
from vision_checkpoints import picture

from quire.frontend.media.llama4_pictures import (
    Llama4Pictures,
    Size,
    best_canvas,
    fitted,
    level_values,
)

CASES: list[tuple[Size, int, int, bool, Size, Size]] = [
    ((100, 70), 336, 16, False, (336, 336), (336, 235)), ((100, 70), 336, 16, True, (1680, 1008), (1440, 1008)),
    ((336, 336), 336, 16, False, (336, 336), (336, 336)), ((336, 336), 336, 16, True, (1344, 1344), (1344, 1344)),
    ((1000, 1400), 336, 16, False, (1008, 1680), (1000, 1400)), ((1000, 1400), 336, 16, True, (1008, 1680), (1008, 1411)),
    ((4000, 3000), 336, 16, False, (1344, 1008), (1344, 1008)), ((3, 2000), 336, 16, False, (336, 2016), (3, 2000)),
    ((3, 2000), 336, 16, True, (336, 5376), (8, 5376)), ((700, 333), 336, 4, False, (1008, 336), (700, 333)),
    ((700, 333), 336, 4, True, (1008, 336), (706, 336)), ((999, 1001), 336, 9, True, (1008, 1008), (1005, 1008)),
    ((50, 70), 28, 4, False, (56, 56), (40, 56)), ((90, 150), 28, 4, False, (56, 56), (33, 56)),
]  # fmt: skip
"""Of a picture, its size; side and number of tiles, `resize_to_max_canvas`; the canvas, and the size inside it."""
LEVELS = [0, 1, 2, 100, 127, 128, 200, 254, 255]
VALUES = {
    (0.5, 0.5): [-1.0, -0.9921875, -0.984375, -0.21484375, -0.00390625, 0.0078125, 0.5703125, 0.9921875, 1.0],
    (0.48, 0.27): [-1.78125, -1.765625, -1.75, -0.326171875, 0.0654296875, 0.0869140625, 1.1328125, 1.9140625, 1.9296875],
}  # fmt: skip
"""Of mean and deviation."""


@pytest.mark.parametrize(("size", "side", "most", "to_most", "canvas", "inside"), CASES)
def test_sizes(size, side, most, to_most, canvas, inside):
    assert best_canvas(size, side, most, to_most) == canvas
    assert fitted(size, canvas, None if to_most else side) == inside


@pytest.mark.parametrize("given", VALUES)
def test_values_are_rounded_as_the_model_was_trained(given):
    assert level_values(1 / 255, *given)[LEVELS].tolist() == VALUES[given]


def test_tiles_are_the_picture_line_by_line_then_the_whole():
    pixels = np.asarray(picture(3, 56, 84))
    found = Llama4Pictures({"size": {"height": 28, "width": 28}, "max_patches": 6})([pixels])
    assert found["aspect_ratios"] == [(3, 2)]
    tiles = found["pixel_values"]
    assert tiles.shape == (7, 3, 28, 28)
    values = level_values(1 / 255, 0.5, 0.5)[pixels]
    for number in range(6):
        top, left = 28 * (number // 2), 28 * (number % 2)
        assert np.array_equal(
            tiles[number], values[top : top + 28, left : left + 28].transpose(2, 0, 1)
        )
    assert abs(tiles[6].mean() - values.mean()) < 0.05


@pytest.mark.parametrize("size", [{"height": 28, "width": 14}, {"height": 0, "width": 0}])
def test_tiles_that_are_no_squares_are_refused(size):
    with pytest.raises(ValueError, match="tiles of the size"):
        Llama4Pictures({"size": size})([np.zeros((9, 9, 3), np.uint8)])
