"""Validates a constraint in the frontend: a bad one gets a 400 that names the fault.

Knows grammars and llguidance's validation. Does not know tokens, or which process it runs in: parsing may take much
time and memory, so the frontend uses a process with limits (`check_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from llguidance import LLMatcher

from quire.errors import ValidationError
from quire.features.structured.errors import UnsupportedConstraint, is_panic
from quire.features.structured.grammar import explained, given_text, grammar_of, limits
from quire.features.structured.matcher import PANIC
from quire.protocol.structured_outputs import FIELD, StructuredOutputsParams


def fault_of(constraint: StructuredOutputsParams) -> str | None:
    """The fault of a constraint, as far as it shows without a vocabulary; None: no fault."""
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


def check_constraint(
    constraint: StructuredOutputsParams,
    find_fault: Callable[[StructuredOutputsParams], str | None] = fault_of,
) -> StructuredOutputsParams:
    """The constraint for the engine protocol.

    Raises:
        ValidationError: it cannot be enforced; the message names the keyword or the place.
    """
    plain = constraint.plain()
    if (fault := find_fault(plain)) is None:
        return plain
    where = plain.field_name if plain.field_name != FIELD else f"{FIELD}.{plain.kind}"
    parameter = FIELD if plain.field_name.startswith(f"{FIELD}.") else plain.field_name
    raise ValidationError(f"{where}: {fault}", parameter=parameter)
