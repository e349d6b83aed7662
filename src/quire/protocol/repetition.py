"""When an output goes round in circles: what a user says about that.

Knows the rules of its numbers. Does not know tokens; `frontend/repetition_detector.py` looks at those.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from quire.errors import ValidationError
from quire.protocol import validators

NAME = "repetition_detection"
LONGEST = 256  # tokens of a pattern: each token of an output is compared with that many before it


class RepetitionDetectionParams(Struct, omit_defaults=True):
    """An output ends when its last tokens are one pattern `min_count` times.

    Raises:
        ValidationError: a number is out of its range.
    """

    max_pattern_size: int = 0
    """Tokens of the longest pattern that counts; 0: none does."""
    min_pattern_size: int = 0
    """Tokens of the shortest; 0 is 1."""
    min_count: int = 0
    """How often a pattern must come, one time after the other; at least 2."""

    def __post_init__(self) -> None:
        most = validators.whole_number(
            f"{NAME}.max_pattern_size", self.max_pattern_size, 0, LONGEST
        )
        self.max_pattern_size = most
        if not most:
            return
        self.min_pattern_size = validators.whole_number(
            f"{NAME}.min_pattern_size", self.min_pattern_size, 0, most, "at most max_pattern_size"
        )
        self.min_count = validators.whole_number(f"{NAME}.min_count", self.min_count, 2)

    @classmethod
    def read(cls, given: Any) -> RepetitionDetectionParams:
        """From JSON's object.

        Raises:
            ValidationError: it is none, or has a name or a number that is none of ours.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise validators.wrong(NAME, given, "an object")
        known = cls.__struct_fields__
        if unknown := [name for name in given if name not in known]:
            raise ValidationError(
                f"{NAME} has no {unknown[0]!r}; it has {', '.join(known)}", parameter=NAME, value=unknown[0],
            )  # fmt: skip
        return cls(**given)
