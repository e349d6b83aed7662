"""Errors of structured output: a constraint that cannot be enforced, and a panic of llguidance."""

from __future__ import annotations

from quire.errors import QueueFull


class UnsupportedConstraint(ValueError):
    """A constraint cannot be enforced. The message names the keyword or the place; the caller prefixes the field."""


class CompileDelayed(QueueFull):
    """A grammar's process got too little processor time from a busy machine. The same request may succeed later."""


def is_panic(error: BaseException) -> bool:
    """Whether it is a Rust panic, which is no `Exception`: uncaught, one bad request would end the process."""
    return type(error).__name__ == "PanicException"
