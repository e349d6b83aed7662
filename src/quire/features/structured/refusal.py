"""The errors of this feature: a constraint that cannot be enforced as it stands, and an engine that fails on it."""

from __future__ import annotations


class Refused(ValueError):
    """The message names the keyword or the place; whoever knows the request's field puts it before."""


def is_panic(error: BaseException) -> bool:
    """Rust code gave up. That is no Exception to Python, and would end the process for one bad request."""
    return type(error).__name__ == "PanicException"
