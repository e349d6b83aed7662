"""Reads rows of a vision tower that stand for a picture: checks their shape, and puts what surrounds a picture around them.

The model's processor says what that is: one blank picture is processed at first use. Knows the model's sizes and tokens. Does not know
files of pictures.

Shape suffixes: N rows, F features of all layers of the tower that the language model takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy as np

from quire.frontend.array_files import Matrix, MatrixError
from quire.frontend.media.content_parts import GivenMedia
from quire.frontend.media.errors import refused
from quire.frontend.media.given_rows import GivenRows
from quire.frontend.media.processed_cache import ReadMedia, Runs
from quire.models.vision import VisionModel
from quire.protocol.media import ROWS, VIDEO
from quire.protocol.tensor_data import TensorData

ENABLE = "embeddings in the place of pictures are off: start the server with --enable-mm-embeds, or send the picture"
SIDE = 64  # of the blank picture


class Surroundings(NamedTuple):
    """Of the rows of a picture: its text, with one token for all rows, and the tokens before and after them."""

    text: str
    before: list[int]
    after: list[int]


class RowInputs:
    """`blank`: processes a blank picture or video of a kind. `most_rows`: of one item."""

    def __init__(
        self, model: VisionModel, most_rows: int, enabled: bool, blank: Callable[[str], ReadMedia]
    ):
        self.model, self.most_rows, self.enabled, self.blank = model, most_rows, enabled, blank
        self._known: dict[str, Surroundings | None] = {}

    def read(self, given: GivenMedia, rows: GivenRows) -> ReadMedia:
        """Blocks. Raises ValidationError: they are not rows of this model."""
        where, kind = given.where, given.kind
        if not self.enabled:
            raise refused(where, ENABLE)
        width = self.model.width * (1 + self.model.inner_layers)
        try:
            matrix = rows.matrix(self.most_rows, width)
            grids = [self._grid(rows, matrix)] if self.model.has_grid else []
            seconds = rows.interval()
        except MatrixError as why:
            raise refused(where, str(why)) from None
        count, features = matrix.array_ND.shape
        if features != width:
            raise refused(where, f"has {features} numbers for each row; a row of this model's vision tower has {width}")  # fmt: skip
        if count > self.most_rows:
            raise refused(where, f"has {count} rows; the limit is {self.most_rows} (--max-num-batched-tokens)")  # fmt: skip
        around = self._surroundings(kind, where)
        data = matrix.array_ND.tobytes()
        row = self.model.image_token_id if kind != VIDEO else self.model.video_row_id
        ids = [*around.before, *[row or 0] * count, *around.after]
        runs: Runs = [(len(around.before), count)]
        interval = seconds * self.model.tokens_per_second or 1.0
        head = json.dumps([kind, matrix.dtype, [count, features], grids, interval]).encode()
        digest = blake2b(len(head).to_bytes(4, "little") + head, digest_size=20, person=b"quire rows")  # fmt: skip
        digest.update(data)
        tensors = {ROWS: TensorData(matrix.dtype, (count, features), data)}
        return ReadMedia(kind, digest.hexdigest(), around.text, ids, runs, grids, tensors, interval)

    def _grid(self, rows: GivenRows, matrix: Matrix) -> tuple[int, int, int]:
        """In rows. Raises MatrixError: there is none, or it has another number of rows."""
        t, h, w = rows.grid_thw()
        merge = self.model.merge
        if h % merge or w % merge or prod((t, h, w)) // merge**2 != len(matrix.array_ND):
            raise MatrixError(f"has {len(matrix.array_ND)} rows for a grid of {t}x{h}x{w} patches, of which {merge}x{merge} make a row")  # fmt: skip
        return t, h // merge, w // merge

    def _surroundings(self, kind: str, where: str) -> Surroundings:
        """Raises ValidationError: pictures of this model have text between their rows."""
        if kind not in self._known:
            blank = self.blank(kind)
            self._known[kind] = None
            if len(blank.runs) == 1:
                start, length = blank.runs[0]
                self._known[kind] = Surroundings(blank.text, blank.ids[:start], blank.ids[start + length :])  # fmt: skip
        if (found := self._known[kind]) is None:
            raise refused(
                where, f"a {kind} of this model has text between its rows: send the {kind} itself"
            )
        return found


def blank_pixels(kind: str) -> np.ndarray:
    """White: a picture [H, W, 3], or a video [T, H, W, 3] of several groups of frames."""
    return np.full((4, SIDE, SIDE, 3) if kind == VIDEO else (SIDE, SIDE, 3), 255, np.uint8)
