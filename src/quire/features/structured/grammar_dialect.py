"""Reads grammars in EBNF (`root ::= ...`) and Lark (`start: ...`), as Lark for llguidance.

Knows how the two differ, and where Lark's syntax is wider than llguidance's. Does not know tokens.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import any_to_lark

from quire.features.structured.cost import check_grammar
from quire.features.structured.errors import UnsupportedConstraint

# Without \s, which matches line breaks: many of them would take quadratic time.
LARK_START = re.compile(r"^[ \t]*[?!]{0,2}start(\.-?\d+)?[ \t]*:(?!:=)", re.MULTILINE)
PRIORITY = re.compile(r"^([ \t]*[?!]{0,2}\w+)\.-?\d+(?=[ \t]*:)", re.MULTILINE)


def read_grammar(text: str) -> str:
    """Convert a grammar to Lark.

    Raises:
        UnsupportedConstraint: it is neither EBNF nor Lark, or too large.
    """
    if not text.strip():
        raise UnsupportedConstraint("it is empty")
    check_grammar(text)
    if LARK_START.search(text):
        # A priority chooses one of several parses of a text; it does not change which texts match.
        return PRIORITY.sub(r"\1", text)
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises many types
        raise UnsupportedConstraint(
            f"it is neither Lark (`start: ...`) nor a supported EBNF grammar: {error}"
        ) from error
