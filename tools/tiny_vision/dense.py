"""What the tower is told beside the answers: the thing in each patch, and a caption with a word for each row.

The first layers learn from the patches what is where, and the last ones from the caption to gather it. Neither is published.
Knows scenes and quire-tiny's tokens.

Shapes: L patches or rows, N labels of a patch: kind, colour, rank from the left, and which
digit of its number from the left.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from tools.tiny_vision.questions import place
from tools.tiny_vision.scenes import COLOURS, MOST, SHAPES, Scene, Thing

KINDS = ("nothing", *SHAPES, *"0123456789")
DIGITS_FROM = 1 + len(SHAPES)
KIND_CLASSES, COLOUR_CLASSES, RANKS = len(KINDS), 1 + len(COLOURS), 1 + MOST
DIGITS = 1 + 3  # no digit, or which of a number's from the left
DIGIT_WEIGHT = 4.0  # of a digit in the losses: digits are few, and the hardest to tell apart
UNKNOWN = -100


def labels(scene: Scene, side: int) -> np.ndarray:
    """[side * side, N]: of the thing in which a patch's centre is; UNKNOWN where it is near its edge."""
    made = np.zeros((side, side, 4), np.int64)
    centres = (np.arange(side) + 0.5) / side
    for rank, thing in enumerate(scene.things, 1):
        across, down = (centres - thing.x) / thing.width, (centres - thing.y) / thing.height
        near = (np.abs(down) < 0.5 + 0.5 / side / thing.height)[:, None] & (np.abs(across) < 0.5 + 0.5 / side / thing.width)[None]  # fmt: skip
        made[near] = UNKNOWN
        for row in np.flatnonzero(np.abs(down) < 0.5):
            for column in np.flatnonzero(np.abs(across) < 0.5):
                digit = _digit(thing, across[column])
                kind = thing.kind[digit - 1] if digit else thing.kind
                made[row, column] = KINDS.index(kind), 1 + COLOURS.index(thing.colour), rank, digit
    return made.reshape(-1, 4)


def _digit(thing: Thing, across: float) -> int:
    """Which digit of a number, from 1, is at this place (-0.5 to 0.5); 0: it is no number."""
    if not thing.is_number:
        return 0
    return 1 + min(int((across + 0.5) * len(thing.kind)), len(thing.kind) - 1)


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

    def weights(self) -> np.ndarray:
        """[V]: of each word in the loss of captions."""
        made = np.ones(self.tokenizer.get_vocab_size(), np.float32)
        made[[self._ids(digit) for digit in "0123456789"]] = DIGIT_WEIGHT
        return made

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


PLACES = tuple(" ".join(w for w in (a, b) if w) or "middle" for a in ("top", "", "bottom") for b in ("left", "", "right"))  # fmt: skip
NAMES = (*SHAPES, "number")
OWN = ("colour", "kind", "place", "left colour", "left kind", "right colour", "right kind")
OWN_CLASSES = tuple(1 + len({"colour": COLOURS, "kind": NAMES, "place": PLACES}[name.split(" ")[-1]]) for name in OWN)  # fmt: skip
COUNTS = 1 + MOST


def relations(scene: Scene) -> np.ndarray:
    """[MOST * 7 + 8]: first, for each thing of the scene, the properties in OWN that the tower's row of the thing has to hold beside its word (0: the
    thing has no such property), so that the language model finds properties that a question combines in one row; then the number of shapes of each
    colour, for the last rows."""
    made = np.zeros((MOST + 2, len(OWN)), np.int64)
    for at, thing in enumerate(scene.things, 1):
        colour, kind = 1 + COLOURS.index(thing.colour), 1 + NAMES.index("number" if thing.is_number else thing.kind)  # fmt: skip
        made[at, :3] = colour, kind, 1 + PLACES.index(nearest_place(thing))
        made[at + 1, 3:5] = made[at - 1, 5:7] = colour, kind
    counts = [sum(one.colour == colour for one in scene.shapes) for colour in COLOURS]
    return np.concatenate((made[1:-1].flatten(), counts))


def _put(row: np.ndarray, at: int, ids: list[int], most: int) -> None:
    row[at : at + min(len(ids), most)] = ids[:most]
