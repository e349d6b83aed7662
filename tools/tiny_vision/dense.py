"""What the tower is told beside the answers: the thing in each patch, and a caption with a word for each row.

The first layers learn from the patches what is where, and the last ones from the caption to gather it. Neither is published.
Knows scenes and quire-tiny's tokens.

Shapes: L patches or rows, N labels of a patch: kind, colour, rank from the left.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_vision.questions import place
from tools.tiny_vision.scenes import COLOURS, MOST, SHAPES, Scene, Thing

KINDS = ("nothing", *SHAPES, *"0123456789")
KIND_CLASSES, COLOUR_CLASSES, RANKS = len(KINDS), 1 + len(COLOURS), 1 + MOST
UNKNOWN = -100


def labels(scene: Scene, side: int) -> np.ndarray:
    """[side * side, N]: of the thing in which a patch's centre is; UNKNOWN where it is near its edge."""
    made = np.zeros((side, side, 3), np.int64)
    centres = (np.arange(side) + 0.5) / side
    for rank, thing in enumerate(scene.things, 1):
        across, down = (centres - thing.x) / thing.width, (centres - thing.y) / thing.height
        near = (np.abs(down) < 0.5 + 0.5 / side / thing.height)[:, None] & (np.abs(across) < 0.5 + 0.5 / side / thing.width)[None]  # fmt: skip
        made[near] = UNKNOWN
        for row in np.flatnonzero(np.abs(down) < 0.5):
            for column in np.flatnonzero(np.abs(across) < 0.5):
                made[row, column] = KINDS.index(_kind(thing, across[column])), 1 + COLOURS.index(thing.colour), rank  # fmt: skip
    return made.reshape(-1, 3)


def _kind(thing: Thing, across: float) -> str:
    """The shape, or the digit at this place (-0.5 to 0.5) of a number."""
    if not thing.is_number:
        return thing.kind
    return thing.kind[min(int((across + 0.5) * len(thing.kind)), len(thing.kind) - 1)]


SLOT = 12  # rows of a thing: the first for its colour
NAME, PLACE = 4, 6  # of these 12 rows: for the thing's kind, and after them for its place


class Captions:
    """The caption of a scene as tokens of quire-tiny, each word at the same rows of every caption."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer, self.rows = tokenizer, rows
        (self.nothing,) = self._ids("\n")
        (self.end,) = self._ids(",")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def caption(self, scene: Scene) -> np.ndarray:
        """[L]: for each thing from the left its colour, kind and place; then how many there are of each shape, and of all."""
        made = np.full(self.rows, self.nothing, np.int64)
        for number, thing in enumerate(scene.things):
            _put(made, number * SLOT, self._ids(f" {thing.colour}"), 1)
            _put(made, number * SLOT + 1, self._ids(f" {thing.kind}"), NAME)
            _put(made, number * SLOT + 1 + NAME, self._ids(f" {nearest_place(thing)}"), PLACE)
            made[number * SLOT + SLOT - 1] = self.end
        at = MOST * SLOT
        for kind in ("shape", *SHAPES):
            count = sum(kind in ("shape", one.kind) for one in scene.shapes)
            _put(made, at, self._ids(str(count)), 1)
            _put(made, at + 1, self._ids(f" {kind}"), 2)
            at += 3
        return made


def nearest_place(thing: Thing) -> str:
    """As `place`, for things between two places as well."""
    middle = [round((int(min(at, 0.999) * 3) + 0.5) / 3, 6) for at in (thing.x, thing.y)]
    return place(Thing(thing.colour, thing.kind, middle[0], middle[1], 0, 0))


def _put(row: np.ndarray, at: int, ids: list[int], most: int) -> None:
    row[at : at + min(len(ids), most)] = ids[:most]
