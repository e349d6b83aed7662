"""Scenes as pictures, drawn with Pillow in many sizes, tints and typefaces.

Knows pixels. Knows nothing of texts.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.tiny_vision.scenes import Scene, Thing

RGB = tuple[int, int, int]
TINTS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (200, 20, 20)), "green": ((0, 128, 0), (0, 200, 40), (60, 160, 60), (0, 255, 0)),
    "blue": ((0, 0, 255), (30, 90, 230), (0, 0, 150)), "yellow": ((255, 255, 0), (255, 220, 0)),
    "orange": ((255, 165, 0), (255, 128, 0)), "purple": ((128, 0, 128), (110, 30, 170)),
    "pink": ((255, 192, 203), (255, 105, 180)), "black": ((0, 0, 0), (35, 35, 35)),
}  # fmt: skip
SIDES = (64, 300)  # pixels of the shorter side
DOTS = {
    "0": "01110 10001 10011 10101 11001 10001 01110", "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111", "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010", "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110", "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110", "9": "01110 10001 10001 01111 00001 00010 01100",
}  # fmt: skip
"""Digits of 5 x 7 dots, as of text displays."""


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene on a light ground, with tints, a size and a typeface of the generator's choice."""
    side = int(rng.uniform(*SIDES))
    size = (round(side * scene.aspect), side) if scene.aspect >= 1 else (side, round(side / scene.aspect))  # fmt: skip
    ground = (255, 255, 255) if rng.random() < 0.6 else tuple(rng.randint(236, 255) for _ in "rgb")
    image = Image.new("RGB", size, ground)
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        draw_thing(canvas, thing, size, tint(thing.colour, rng), rng)
    return image


def tint(colour: str, rng: random.Random) -> RGB:
    """One of a colour's, or between two, and a little beside."""
    one, other = rng.choice(TINTS[colour]), rng.choice(TINTS[colour])
    part = rng.choice((0.0, rng.random()))
    return tuple(
        min(255, max(0, round(a + part * (b - a)) + rng.randint(-8, 8)))
        for a, b in zip(one, other, strict=True)
    )  # type: ignore[return-value]


def draw_thing(canvas: Any, thing: Thing, size: tuple[int, int], fill: RGB, rng: random.Random) -> None:  # fmt: skip
    """Into its box."""
    width, height = thing.width * size[0], thing.height * size[1]
    left, top = thing.x * size[0] - width / 2, thing.y * size[1] - height / 2
    if thing.is_number:
        written = _dots if rng.random() < 0.4 else _letters
        written(canvas, thing.kind, (left, top, width, height), fill)
    elif thing.kind == "circle":
        canvas.ellipse((left, top, left + width, top + height), fill=fill)
    elif thing.kind == "square":
        canvas.rectangle((left, top, left + width, top + height), fill=fill)
    else:
        corners = CORNERS[thing.kind]
        canvas.polygon([(left + x * width, top + y * height) for x, y in corners], fill=fill)


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        radius = 0.5 if i % 2 == 0 else 0.21
        angle = math.pi * (i / 5 - 0.5)
        points.append((0.5 + radius * math.cos(angle), 0.5 + radius * math.sin(angle)))
    return points


CORNERS = {"triangle": [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)], "star": _star()}


def _dots(canvas: Any, digits: str, box: tuple[float, ...], fill: RGB) -> None:
    left, top, width, height = box
    columns = 6 * len(digits) - 1
    step, down = width / columns, height / 7
    for number, digit in enumerate(digits):
        for row, line in enumerate(DOTS[digit].split()):
            for column, dot in enumerate(line):
                if dot == "1":
                    x, y = left + (6 * number + column) * step, top + row * down
                    canvas.rectangle((x, y, x + max(step - 1, 1), y + max(down - 1, 1)), fill=fill)


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _letters(canvas: Any, digits: str, box: tuple[float, ...], fill: RGB) -> None:
    """In Pillow's own typeface, as large as the box allows."""
    left, top, width, height = box
    size = max(8, round(height * 1.38))  # digits are 0.72 of a typeface's size
    x0, y0, x1, y1 = canvas.textbbox((0, 0), digits, font=_font(size))
    if x1 - x0 > width * 1.1:
        size = max(8, int(size * width * 1.1 / (x1 - x0)))
        x0, y0, x1, y1 = canvas.textbbox((0, 0), digits, font=_font(size))
    x, y = left + (width - (x1 - x0)) / 2 - x0, top + (height - (y1 - y0)) / 2 - y0
    canvas.text((x, y), digits, font=_font(size), fill=fill)


def pixels(image: Image.Image, side: int) -> np.ndarray:
    """[3, side, side] of -1 to 1, as the processor of the published folder makes it."""
    small = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float32)
    return ((small / 255 - 0.5) / 0.5).transpose(2, 0, 1)
