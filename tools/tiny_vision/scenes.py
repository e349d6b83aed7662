"""The drawn world: scenes of up to four things, each with a colour, a kind and a place; and which scenes are held out.

Everything follows from a seeded generator. Knows neither pixels nor texts.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "black")
DARK = ("red", "green", "blue", "orange", "purple", "black")  # of numbers, whose lines are thin
MOST = 4  # things of a scene
APART = 0.09  # of the picture's width: the centres of two things differ by so much, so that "left of" is clear
GAP = 0.02  # of its width and height, between the boxes of two things
SIZES = {
    1: (0.22, 0.5),
    2: (0.2, 0.4),
    3: (0.18, 0.32),
    4: (0.18, 0.28),
}  # of the shorter side, by the number of things
HELD_OUT_IN = 16


@dataclass(frozen=True)
class Thing:
    """`kind`: one of SHAPES, or the digits of a number. Centre and size are parts of the picture's width and height."""

    colour: str
    kind: str
    x: float
    y: float
    width: float
    height: float

    @property
    def is_number(self) -> bool:
        return self.kind.isdigit()

    def overlaps(self, other: Thing) -> bool:
        return (
            abs(self.x - other.x) < (self.width + other.width) / 2 + GAP
            and abs(self.y - other.y) < (self.height + other.height) / 2 + GAP
        )


@dataclass(frozen=True)
class Scene:
    """`things`: from left to right, at most one of them a number in scenes that are asked about. `aspect`: width over height of the picture."""

    things: tuple[Thing, ...]
    aspect: float

    @property
    def held_out(self) -> bool:
        """By what is in it, from left to right: a held-out combination is in no picture of the training."""
        key = " ".join(f"{one.colour} {one.kind}" for one in self.things)
        return hashlib.sha1(key.encode()).digest()[0] % HELD_OUT_IN == 0

    @property
    def number(self) -> Thing | None:
        return next((one for one in self.things if one.is_number), None)

    @property
    def shapes(self) -> list[Thing]:
        return [one for one in self.things if not one.is_number]


def scene(rng: random.Random, held_out: bool = False, numbers: float = 0.0) -> Scene:
    """The next scene of this side of the split. `numbers`: share of the scenes in which most things are numbers: digits are hard to
    learn, and rare in other scenes."""
    while True:
        made = _drawn(rng, numbers > 0 and rng.random() < numbers)
        if made is not None and made.held_out == held_out:
            return made


def _drawn(rng: random.Random, numbers: bool = False) -> Scene | None:
    """None: the things found no room."""
    count = rng.choices(range(1, MOST + 1), (2, 3, 4, 3))[0]
    aspect = 1.0 if rng.random() < 0.6 else rng.uniform(0.75, 1.34)
    numbered = rng.randrange(count) if rng.random() < 0.4 else -1
    # A few colours and shapes in most scenes, so that questions such as "how many circles" have other answers than one.
    colours = rng.sample(COLOURS, rng.choice((2, 3, 8)))
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 4)))
    things: list[Thing] = []
    for number in range(count):
        colour = rng.choice(colours)
        if number == numbered or (numbers and rng.random() < 0.8):
            colour = rng.choice([one for one in colours if one in DARK] or DARK)
            digits = rng.choices((1, 2, 3), (4, 5, 1 if count < 3 else 0))[0]
            kind = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        else:
            kind = rng.choice(shapes)
        thing = _placed(rng, colour, kind, SIZES[count], aspect, things)
        if thing is None:
            return None
        things.append(thing)
    return Scene(tuple(sorted(things, key=lambda one: one.x)), aspect)


def _placed(
    rng: random.Random, colour: str, kind: str, sizes: tuple[float, float], aspect: float, others: list[Thing]
) -> Thing | None:  # fmt: skip
    height = rng.uniform(*sizes)
    width = height
    if kind.isdigit():
        height = max(height, 0.24)
        width = (
            height * (6 * len(kind) - 1) / 7 * rng.uniform(0.85, 1.1)
        )  # as of letters of 5 x 7 dots
    # Sizes are parts of the shorter side; things are not stretched.
    width, height = (width / aspect, height) if aspect >= 1 else (width, height * aspect)
    if width > 0.94 or height > 0.94:
        return None
    for _ in range(12):
        x, y = rng.uniform(width / 2 + 0.02, 0.98 - width / 2), rng.uniform(height / 2 + 0.02, 0.98 - height / 2)  # fmt: skip
        thing = Thing(colour, kind, x, y, width, height)
        if not any(thing.overlaps(one) or abs(x - one.x) < APART for one in others):
            return thing
    return None
