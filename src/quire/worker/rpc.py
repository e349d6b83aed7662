"""`collective_rpc`: a call of one of a worker's functions or methods, by name.

Knows names and arguments. Does not know what the functions do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.errors import ValidationError


class HasFunctions(Protocol):
    """A worker: its functions by name, and public methods beside them."""

    functions: dict[str, Callable[..., Any]]


def call_method(
    worker: HasFunctions,
    method: str,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a function of `worker.functions`; else a public method of the worker, or of its subclass.

    Raises:
        ValidationError: there is none of that name, or it does not take these arguments.
    """
    function = worker.functions.get(method)
    if function is None and not method.startswith("_"):
        function = getattr(worker, method, None)
    if not callable(function):
        methods = (name for name in dir(type(worker)) if not name.startswith("_"))
        names = ", ".join(sorted({*worker.functions, *methods}))
        raise ValidationError(
            f"the worker has no function or method {method!r}; it has {names}",
            parameter="method",
            value=method,
        )
    kwargs = kwargs or {}
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ValidationError(f"the worker's {method!r}: {error}", parameter="args") from None
    return function(*args, **kwargs)
