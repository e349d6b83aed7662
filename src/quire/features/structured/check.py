"""The front room's check of a constraint: refused with a 400 that names the fault, before it travels.

Knows grammars and how to ask llguidance for its opinion. Does not know tokens. Answers are kept: agents send the
same schema again and again.
"""

from __future__ import annotations

import functools

from llguidance import LLMatcher

from quire.errors import ValidationError
from quire.features.structured.grammar import explained, grammar_of, limits
from quire.features.structured.refusal import Refused, is_panic
from quire.protocol.constraint import FIELD, StructuredOutputsParams

KEPT = 512


def checked(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """The constraint as it travels.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    plain = constraint.plain()
    if (why := _verdict(_Keyed(plain))) is not None:
        where = plain.said if plain.said != FIELD else f"{FIELD}.{plain.kind}"
        raise ValidationError(f"{where}: {why}", parameter=plain.said)
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
def _verdict(keyed: _Keyed) -> str | None:
    """What is wrong with it."""
    try:
        text = grammar_of(keyed.constraint)
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    except Refused as error:
        return str(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        return f"llguidance fails on it: {error}"
    return explained(" ".join(messages)) if failed or messages else None
