"""Rows of a vision tower that a request gives in the place of a picture or video: `image_embeds`, `video_embeds`.

Knows the forms of clients and programs. `inputs.py` checks what depends on the model. No pickle is read (`array_files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.errors import ValidationError
from quire.frontend.array_files import Matrix, MatrixError, matrix_in, matrix_of

MOST_SIDE = 1 << 16  # of a grid


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """As they are given.

    Attributes:
        rows: base64 of a file, or a tensor [rows, features].
        grid: (time, height, width) in patches, for models whose rotary positions follow the picture; None: not given.
        seconds: from one group of a video's frames to the next; None: not given.
    """

    rows: Any
    grid: Any = None
    seconds: Any = None

    def matrix(self, most_rows: int, width: int) -> Matrix:
        """Raises MatrixError: it is something else, or larger."""
        if isinstance(self.rows, str):
            return matrix_in(self.rows, most_rows, width)
        return matrix_of(self.rows)

    def grid_thw(self) -> tuple[int, int, int]:
        """Raises MatrixError: the grid is missing, or has another form."""
        found = numbers(self.grid)
        while isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not (
            isinstance(found, list)
            and len(found) == 3
            and all(type(n) is int and 0 < n <= MOST_SIDE for n in found)
        ):
            raise MatrixError("needs its grid, [time, height, width] in patches, as image_grid_thw or video_grid_thw")  # fmt: skip
        return found[0], found[1], found[2]

    def interval(self) -> float:
        """Seconds, or 0. Raises MatrixError: no such number."""
        found = numbers(self.seconds)
        while isinstance(found, list) and len(found) == 1:
            found = found[0]
        if found is None:
            return 0.0
        if type(found) not in (int, float) or not 0 < found < 1e6:
            raise MatrixError("has `second_per_grid_ts` that is no number of seconds above 0")
        return float(found)


def numbers(value: Any) -> Any:
    """Lists, from a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def rows_of_program(kind: str, value: Any) -> list[GivenRows] | None:
    """The items of a value of `multi_modal_data`: a dict with the rows of all and their grids, a tensor [rows, features] of one, or
    [items, rows, features]. None: it is a picture or video.

    Raises:
        ValidationError: a dict of another form.
    """
    if isinstance(value, Mapping):
        return _of_dict(kind, value)
    if not _holds_floats(value):
        return None
    if value.ndim == 2:
        return [GivenRows(value)]
    return [GivenRows(one) for one in value] if value.ndim == 3 else None


def _holds_floats(value: Any) -> bool:
    return hasattr(value, "ndim") and "float" in str(getattr(value, "dtype", ""))


def _of_dict(kind: str, value: Mapping[str, Any]) -> list[GivenRows]:
    name, grid = f"{kind}_embeds", f"{kind}_grid_thw"
    rows, known = value.get(name), {name, grid, "second_per_grid_ts"}
    if rows is None or value.keys() - known or not _holds_floats(rows):
        raise ValidationError(
            f"multi_modal_data.{kind}: a dict has the keys {', '.join(sorted(known))}, and a tensor for the first",
            parameter=f"multi_modal_data.{kind}",
        )
    grids, seconds = numbers(value.get(grid)), numbers(value.get("second_per_grid_ts"))
    if not (isinstance(grids, list) and grids and isinstance(grids[0], list)) or len(grids) == 1:
        return [GivenRows(rows, grids, seconds)]
    patches = [prod(one) for one in grids]
    found, start = [], 0
    for number, (one, count) in enumerate(zip(grids, patches, strict=True)):
        length = len(rows) * count // max(sum(patches), 1)
        own = seconds[number] if isinstance(seconds, list) and number < len(seconds) else seconds
        found.append(GivenRows(rows[start : start + length], one, own))
        start += length
    return found
