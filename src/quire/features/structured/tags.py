"""Structural tags: free text in which a tag opens a constrained part.

Knows both JSON forms of structural tags and Lark. Does not know tokens.
"""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.protocol.constraint import FIELD, StructuredOutputsParams


def tags_to_lark(value: str | dict[str, Any], constraint: StructuredOutputsParams) -> str:
    """A grammar.

    Raises:
        ValidationError: the form is not known.
    """
    raise ValidationError(
        f"{FIELD}.structural_tag is not here yet", parameter=f"{FIELD}.structural_tag"
    )
