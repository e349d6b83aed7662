"""Converts a constraint to grammar text for llguidance.

Knows the kinds of constraints. Does not know tokens, except the special ones that tags may contain. This module, or
llguidance when it reads the grammar, refuses by name what cannot be enforced exactly; nothing is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from quire.features.structured.cost import check_regex, check_text
from quire.features.structured.errors import UnsupportedConstraint
from quire.features.structured.grammar_dialect import read_grammar
from quire.features.structured.json_schema import MAX_BYTES, read_schema
from quire.features.structured.structural_tags import tags_to_grammar
from quire.protocol.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 4096
MAX_ITEMS = 10_000  # parser items at one position: an object needs four per property
UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \[(".*?")\]')
SPENT = re.compile(
    r"fuel exhausted|[Tt]oo many|Current row has \d+ items|[Tt]ooComplex|InternalError"
)
TOO_MUCH = "it is too complex; make it smaller, or use fewer repetitions"
MAX_TOLD = 1000  # characters of llguidance's message
PREFIX = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
EXCERPT = re.compile(r"\n *\d+ \| (.*)(\n +\^)?")
"""A line of the grammar in llguidance's message, and the mark below it."""


def limits() -> LLParserLimits:
    """llguidance's limits of work for a grammar: to compile it (about 0.1 s), and for one mask (about 0.03 s).

    llguidance does not count all work (not forced text); `compiler.py` and `grammar_server.py` have the hard limits.
    """
    return LLParserLimits(
        initial_lexer_fuel=5_000_000,
        step_lexer_fuel=400_000,
        step_max_items=200_000,
        max_items_in_row=MAX_ITEMS,
        max_lexer_states=40_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


def grammar_of(
    constraint: StructuredOutputsParams, specials: Mapping[str, int] | None = None
) -> str:
    """The grammar text of a constraint.

    Args:
        specials: special tokens (text -> id) that the text of a tag may contain.

    Raises:
        UnsupportedConstraint: the constraint cannot be enforced.
    """
    kind = constraint.kind
    value: Any = getattr(constraint, kind)
    size = len(value) if isinstance(value, str) else 0
    if size > MAX_BYTES:
        raise UnsupportedConstraint(f"it has {size} characters; the limit is {MAX_BYTES}")
    match kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(read_schema(value, constraint))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(read_schema({"type": "object"}, constraint))
        case "regex":
            check_regex(value)
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return _choice(value)
        case "grammar":
            return read_grammar(value)
    return tags_to_grammar(value, constraint, specials or {})


def _choice(texts: list[str]) -> str:
    if len(texts) > MAX_CHOICES:
        raise UnsupportedConstraint(f"it has {len(texts)} strings; the limit is {MAX_CHOICES}")
    if sum(map(len, texts)) > MAX_BYTES:
        raise UnsupportedConstraint(f"its strings have more than {MAX_BYTES} characters in total")
    for text in texts:
        check_text(text)
    quoted = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return "start: TEXT\nTEXT: " + "\n    | ".join(quoted)


def given_text(constraint: StructuredOutputsParams) -> str:
    """The client's text of a constraint, as `explained` compares it."""
    value = getattr(constraint, constraint.kind)
    return value if isinstance(value, str) else ""


def explained(message: str, text: str = "") -> str:
    """llguidance's error message, in terms of the constraint instead of the grammar.

    `text`: the client's text. An excerpt of a grammar that is not part of it is left out.
    """
    message = PREFIX.sub("", message.replace("<non-verbose/>", "").strip())
    lines = [found[1] for found in EXCERPT.finditer(message)]
    if not all(
        line in text or json.dumps(line, ensure_ascii=False)[1:-1] in text for line in lines
    ):
        message = EXCERPT.sub("", message).rstrip()
    if (found := UNKNOWN_KEYS.search(message)) is not None:
        names = ", ".join(sorted(json.loads(f"[{found[1]}]")))
        many = "," in names
        return (
            f"{names}: {'these keywords' if many else 'this keyword'} cannot be enforced; leave"
            f" {'them' if many else 'it'} out, or express the constraint in another way"
        )
    if message.startswith("oneOf constraints are not supported"):
        return "oneOf: a value may match two of its branches; use anyOf instead"
    if message.startswith("NoExtension"):
        return "no output can satisfy it; check for circular references"
    if SPENT.search(message):
        return TOO_MUCH
    return message[:MAX_TOLD]
