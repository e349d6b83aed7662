"""An engine in the server's own process, loaded in a daemon thread.

Loading a model cannot be interrupted, and a loop that closes waits for its own threads. Knows a thread and how to end
the process. Does not know phases or signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.engine.client import EngineClient


class InlineEngineLoader:
    """Makes one engine, once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    async def client(self, config: EngineConfig) -> EngineClient:
        """Raises what `make_client` raises."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[EngineClient] = loop.create_future()

        def tell(settle: Callable[[Any], None], what: object) -> None:
            if not made.done():
                settle(what)

        def load() -> None:
            try:
                told = partial(tell, made.set_result, make_client(config))
            except BaseException as error:
                told = partial(tell, made.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed, and nothing waits
                loop.call_soon_threadsafe(told)

        self._thread = threading.Thread(target=load, name="load", daemon=True)
        self._thread.start()
        return await made

    def leave_behind(self, status: int) -> None:
        """End the process at once if the model still loads: the interpreter must not shut down under the thread."""
        if self._thread is not None and self._thread.is_alive():
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)
