"""The front room's check of a constraint: refused with a 400 that names the fault, before it travels.

Knows grammars, which engines there are, and how to ask llguidance for its opinion. Does not know tokens. Answers are
kept: agents send the same schema again and again.

    auto        guidance; a JSON schema that it refuses may be one that xgrammar, where installed, enforces
    guidance    llguidance or nothing
    xgrammar    what it is known to enforce exactly (`subset.py`); its compiler has the last word
"""

from __future__ import annotations

import functools
import importlib.util

import msgspec
from llguidance import LLMatcher

from quire.errors import ValidationError
from quire.features.structured import subset
from quire.features.structured.grammar import explained, grammar_of, limits
from quire.features.structured.refusal import Refused, is_panic
from quire.protocol.constraint import FIELD, StructuredOutputsParams

KEPT = 512


def checked(constraint: StructuredOutputsParams, backend: str = "auto") -> StructuredOutputsParams:
    """The constraint as it travels, with the engine that is to read it.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    plain = constraint.plain()
    engines = ("guidance", "xgrammar") if backend == "auto" else (backend,)
    refused: list[str] = []
    for engine in engines:
        if (why := _verdict(_Keyed(plain), engine, backend == "auto")) is None:
            if engine != plain.engine:
                plain = msgspec.structs.replace(plain, engine=engine)
            return plain
        refused.append(why)
    where = plain.said if plain.said != FIELD else f"{FIELD}.{plain.kind}"
    raise ValidationError(f"{where}: {refused[0]}", parameter=plain.said)


class _Keyed:
    """A constraint that can be looked up."""

    def __init__(self, constraint: StructuredOutputsParams):
        self.constraint, self.key = constraint, constraint.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(KEPT)
def _verdict(keyed: _Keyed, engine: str, second: bool) -> str | None:
    """What is wrong with it. `second`: another engine has refused it."""
    if engine == "xgrammar":
        if second and (keyed.constraint.kind != "json" or not has_xgrammar()):
            return "it has been refused"
        try:
            subset.check(keyed.constraint)
        except Refused as error:
            return str(error)
        return None
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


def has_xgrammar() -> bool:
    """Looked for and not imported: it would bring torch into the front room."""
    return importlib.util.find_spec("xgrammar") is not None
