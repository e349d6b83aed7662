"""Draws the sample picture of the package: a held-out scene.

python -m tools.tiny_vision.samples src/quire/embedded/quire-tiny/sample.png
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from tools.tiny_vision.pictures import TINTS, draw_thing
from tools.tiny_vision.questions import listed
from tools.tiny_vision.scenes import Scene, Thing

SCENE = Scene(
    (
        Thing("green", "triangle", 0.2, 0.25, 0.28, 0.28),
        Thing("red", "circle", 0.46, 0.72, 0.26, 0.26),
        Thing("black", "42", 0.78, 0.36, 0.3, 0.2),
    ),
    1.0,
)  # fmt: skip
SIDE = 256
ANSWER = listed(list(SCENE.things))


def sample() -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    for thing in SCENE.things:
        draw_thing(
            ImageDraw.Draw(image), thing, image.size, TINTS[thing.colour][0], random.Random(1)
        )
    return image


if __name__ == "__main__":
    sample().save(Path(sys.argv[1]), optimize=True)
