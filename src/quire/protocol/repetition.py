"""RepetitionDetectionParams: when an output counts as endlessly repetitive.

Knows the valid ranges of the parameters. Does not know tokens; `frontend/repetition_detector.py` examines those.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from quire.errors import ValidationError
from quire.protocol import validators

NAME = "repetition_detection"
# tokens of a pattern: each output token is compared with up to that many tokens before it
LONGEST = 256


class RepetitionDetectionParams(Struct, omit_defaults=True):
    """An output ends when its last tokens are one pattern, `min_count` times in a row.

    Raises:
        ValidationError: a number is out of its range.
    """

    max_pattern_size: int = 0
    """Length in tokens of the longest pattern that counts; 0 switches the detection off."""
    min_pattern_size: int = 0
    """Length of the shortest pattern; 0 means 1."""
    min_count: int = 0
    """How often in a row a pattern must occur; at least 2."""

    def __post_init__(self) -> None:
        size = validators.whole_number(
            f"{NAME}.max_pattern_size", self.max_pattern_size, 0, LONGEST
        )
        self.max_pattern_size = size
        if not size:
            return
        self.min_pattern_size = validators.whole_number(
            f"{NAME}.min_pattern_size",
            self.min_pattern_size,
            0,
            size,
            "at most max_pattern_size",
        )
        self.min_count = validators.whole_number(f"{NAME}.min_count", self.min_count, 2)

    @classmethod
    def read(cls, value: Any) -> RepetitionDetectionParams:
        """Parse a JSON object.

        Raises:
            ValidationError: it is not an object, has an unknown name, or has an invalid number.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise validators.wrong(NAME, value, "an object")
        names = cls.__struct_fields__
        if unknown := [name for name in value if name not in names]:
            raise ValidationError(
                f"{NAME} has no field {unknown[0]!r}; the fields are {', '.join(names)}",
                parameter=NAME,
                value=unknown[0],
            )
        return cls(**value)
