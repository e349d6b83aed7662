"""The message of `collective_rpc`, and which calls need the worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.client import EngineClient
from quire.errors import Unsupported

IN_PROCESS = ("apply_model", "call_function", "get_model")
"""Functions whose arguments or results are Python objects, which no message between processes can carry."""


def worker_call(
    client: EngineClient, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments for `EngineClient.call`.

    Raises:
        Unsupported: the call needs the worker in this process, and it is not.
    """
    name, given = (
        (method, list(args)) if isinstance(method, str) else ("call_function", [method, *args])
    )
    if name in IN_PROCESS and (client.epoch or client.resolved.executor != "uni"):
        what = (
            f"collective_rpc({name!r})"
            if isinstance(method, str)
            else "collective_rpc of a function"
        )
        raise Unsupported(
            f"{what} for a worker in another process (functions and modules cannot be sent)",
            "use LLM with distributed_executor_backend='uni', which runs the worker in the program's process",
        )
    return "collective_rpc", name, given, dict(kwargs or {})
