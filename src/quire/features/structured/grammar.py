"""From a constraint to the text of a grammar that llguidance reads.

Knows the forms of a constraint. Does not know tokens: what is made here is the same for every model. What
cannot be enforced exactly is refused by name, here or by llguidance when it reads the grammar; nothing is
dropped in silence.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from quire.errors import ValidationError
from quire.features.structured.schema import MAX_BYTES, read_schema
from quire.features.structured.tags import tags_to_lark
from quire.protocol.constraint import FIELD, StructuredOutputsParams

MAX_CHOICES = 4096


def limits() -> LLParserLimits:
    """How much work one grammar may cause: at compile time, and for one mask (about 20 ms)."""
    return LLParserLimits(
        initial_lexer_fuel=5_000_000,
        step_lexer_fuel=400_000,
        step_max_items=200_000,
        verbose_errors=False,
    )


def refuse(kind: str, why: str) -> ValidationError:
    name = f"{FIELD}.{kind}"
    return ValidationError(f"{name}: {why}", parameter=name)


def grammar_of(constraint: StructuredOutputsParams) -> str:
    """The grammar's text.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    kind = constraint.kind
    value: Any = getattr(constraint, kind)
    size = len(value) if isinstance(value, str) else 0
    if size > MAX_BYTES:
        raise refuse(kind, f"it has {size} characters; at most {MAX_BYTES} are taken")
    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(read_schema(value, constraint))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(read_schema({"type": "object"}, constraint))
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return _choice(value)
        case "grammar":
            return _grammar(value)
    return tags_to_lark(value, constraint)


def _choice(texts: list[str]) -> str:
    if len(texts) > MAX_CHOICES:
        raise refuse("choice", f"it has {len(texts)} texts; at most {MAX_CHOICES} are taken")
    if sum(map(len, texts)) > MAX_BYTES:
        raise refuse("choice", f"its texts have more than {MAX_BYTES} characters together")
    return "start: " + "\n     | ".join(json.dumps(text) for text in dict.fromkeys(texts))


def _grammar(text: str) -> str:
    if not text.strip():
        raise refuse("grammar", "it is empty")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises what it likes
        raise refuse("grammar", f"it is no EBNF that we can read: {error}") from error
