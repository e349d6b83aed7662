"""The remedy for a value that is none of the known names: the nearest one, then all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6


def nearest(value: object, names: Iterable[str]) -> str | None:
    """The name that is most like `value`, in whole or in its beginning: "lama" is nearer to "llama3_json" than to "xlam"."""
    text = str(value).lower()[:100]

    def likeness(name: str) -> float:
        beginnings = (name, name[: len(text) + 1])
        return max(difflib.SequenceMatcher(None, text, one).ratio() for one in beginnings)

    best = max(names, key=likeness)
    return best if likeness(best) >= CUTOFF else None


def choose_from(value: object, names: Iterable[str]) -> str:
    """-> "did you mean fp8? Choose from fp8, int4, int8"; without a near name "choose from fp8, int4, int8"."""
    known = list(names)
    near = nearest(value, known)
    listed = f"hoose from {', '.join(known)}"
    return f"did you mean {near}? C{listed}" if near else f"c{listed}"
