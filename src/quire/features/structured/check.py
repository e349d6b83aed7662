"""The front room's check of a constraint: refused with a 400 that names the fault, before it travels.

Knows grammars and how to ask llguidance for its opinion. Does not know tokens. Answers are kept: agents send the
same schema again and again.
"""

from __future__ import annotations

import functools

from llguidance import LLMatcher

from quire.errors import ValidationError
from quire.features.structured.grammar import grammar_of, limits, refuse
from quire.protocol.constraint import StructuredOutputsParams

KEPT = 512


def checked(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """The constraint as it travels.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    plain = constraint.plain()
    if (error := _verdict(_Keyed(plain))) is not None:
        raise ValidationError(error[1], parameter=error[0])
    return plain


class _Keyed:
    """A constraint that can be looked up."""

    def __init__(self, constraint: StructuredOutputsParams):
        self.constraint, self.key = constraint, constraint.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(KEPT)
def _verdict(keyed: _Keyed) -> tuple[str, str] | None:
    constraint = keyed.constraint
    try:
        text = grammar_of(constraint)
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
        if failed or messages:
            raise refuse(constraint.kind, " ".join(messages).strip())
    except ValidationError as error:
        return error.parameter or "structured_outputs", str(error)
    return None
