"""Runs a blocking call in a thread of its own, for a coroutine that waits for it.

An event loop's own threads are few: calls that wait for minutes, such as for an engine that drains, would leave none
for the call that ends their wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns or raises. A cancelled caller leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as why:
            error = why
        with suppress(RuntimeError):  # the loop is closed, and nothing waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="engine-call", daemon=True).start()
    return await done
