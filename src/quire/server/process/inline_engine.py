"""An engine in the server's own process, loaded in a daemon thread.

Loading a model cannot be interrupted, and a loop that closes waits for its own threads. Knows a thread and how to end
the process. Does not know phases or signals.
"""

from __future__ import annotations

import logging
import os
import sys

from quire.api.own_thread import in_own_thread
from quire.config.engine import EngineConfig
from quire.engine.build import make_client
from quire.engine.client import EngineClient


class InlineEngineLoader:
    """Makes one engine, once."""

    def __init__(self) -> None:
        self._is_loading = False

    async def client(self, config: EngineConfig) -> EngineClient:
        """Raises what `make_client` raises."""
        self._is_loading = True
        client: EngineClient = await in_own_thread(self._load, config)
        return client

    def _load(self, config: EngineConfig) -> EngineClient:
        try:
            return make_client(config)
        finally:
            self._is_loading = False

    def leave_behind(self, status: int) -> None:
        """End the process at once if the model still loads: the interpreter must not shut down under the thread."""
        if self._is_loading:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)
