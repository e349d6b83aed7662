"""Number types of the configuration fields; msgspec enforces their limits. Its errors in the words of a user."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]

_EXPECTED = re.compile(r"Expected `([^`]+)`(?: ([<>]=?) (\S+))?(?:, got `[^`]+`)?(?: - at `(.+)`)?")
_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of names to values",
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def in_words(error: Exception) -> str:
    """What a value must be: "must be a whole number of at most 65535". Text that is not msgspec's stays as it is."""
    match = _EXPECTED.fullmatch(str(error))
    if match is None:
        return str(error)
    kinds, bound, limit, where = match.groups()
    nouns = [_NOUNS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null"]
    words = [*([f"{where}"] if where else []), "must be", " or ".join(nouns)]
    return " ".join([*words, _BOUNDS[bound], limit.removesuffix(".0")] if bound else words)
