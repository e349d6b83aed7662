"""Validates a constraint in the frontend: a bad one gets a 400 that names the fault.

Knows grammars, the grammar engines, and llguidance's validation. Does not know tokens, or which process it runs in:
parsing may take much time and memory, so the frontend uses a process with limits (`check_process.py`).

    auto        guidance; if it refuses a JSON schema, xgrammar, where installed and able
    guidance    llguidance only
    xgrammar    where installed, for what it is known to enforce exactly (`xgrammar_subset.py`); guidance for the rest
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher

from quire.errors import ValidationError
from quire.features.structured import xgrammar_subset
from quire.features.structured.errors import UnsupportedConstraint, is_panic
from quire.features.structured.grammar import explained, given_text, grammar_of, limits
from quire.features.structured.matcher import PANIC
from quire.protocol.structured_outputs import FIELD, StructuredOutputsParams


def verdict(constraint: StructuredOutputsParams, engine: str, second: bool) -> str | None:
    """The fault of a constraint, as far as it shows without a vocabulary; None: no fault.

    `second`: the backend is `auto`, so xgrammar gets only what guidance has refused.
    """
    if engine == "xgrammar":
        if not has_xgrammar() or (second and constraint.kind != "json"):
            return "xgrammar does not serve it"
        try:
            xgrammar_subset.check(constraint)
        except UnsupportedConstraint as error:
            return str(error)
        return None
    try:
        text = grammar_of(constraint)
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    except UnsupportedConstraint as error:
        return str(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        return PANIC
    return explained(" ".join(messages), given_text(constraint)) if failed or messages else None


ENGINES = {
    "auto": ("guidance", "xgrammar"),
    "guidance": ("guidance",),
    "xgrammar": ("xgrammar", "guidance"),
}
"""Backend -> grammar engines, in the order in which they are asked."""
Verdict = Callable[[StructuredOutputsParams, str, bool], "str | None"]


def check_constraint(
    constraint: StructuredOutputsParams, backend: str = "auto", verdict: Verdict = verdict
) -> StructuredOutputsParams:
    """The constraint for the engine protocol, with the grammar engine that compiles it.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    plain = constraint.plain()
    refused: dict[str, str] = {}
    for engine in ENGINES[backend]:
        if (why := verdict(plain, engine, backend == "auto")) is None:
            if engine != plain.engine:
                plain = msgspec.structs.replace(plain, engine=engine)
            return plain
        refused[engine] = why
    where = plain.field_name if plain.field_name != FIELD else f"{FIELD}.{plain.kind}"
    parameter = FIELD if plain.field_name.startswith(f"{FIELD}.") else plain.field_name
    raise ValidationError(f"{where}: {refused['guidance']}", parameter=parameter)


def has_xgrammar() -> bool:
    """Whether xgrammar is installed. Does not import it: that would import torch into the frontend."""
    return importlib.util.find_spec("xgrammar") is not None
