"""ReasoningMarks: the texts of `reasoning_config`, which start reasoning and end it when its budget is spent.

Knows the option's keys. Does not know tokens or formats (`frontend/thinking_markers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from quire.errors import ConfigError

LONGEST = 1024  # characters: the end is forced token by token
KEYS = ("reasoning_start_str", "reasoning_end_str")


class ReasoningMarks(Struct, frozen=True):
    """ "" is the mark of the model's format."""

    start: str = ""
    end: str = ""
    """What is forced after the budget: a mark, or a sentence that ends with one."""


def reasoning_marks(json_object: Mapping[str, Any]) -> ReasoningMarks:
    """Parse `reasoning_config`.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    for key, value in json_object.items():
        if key not in KEYS:
            raise ConfigError(f"reasoning_config.{key}: unknown key; choose from reasoning_parser, {', '.join(KEYS)}")  # fmt: skip
        if not isinstance(value, str) or len(value) > LONGEST:
            raise ConfigError(f"reasoning_config.{key}: must be a text of at most {LONGEST} characters")  # fmt: skip
    return ReasoningMarks(*(json_object.get(key, "") for key in KEYS))
