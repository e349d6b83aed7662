"""An engine in the server's own process, loaded in a daemon thread.

Loading a model cannot be interrupted, and a loop that closes waits for its own threads. Knows a thread and how to end
the process. Does not know phases or signals.
"""

from __future__ import annotations

import logging
import os
import sys

from quire.api.run_in_thread import run_in_thread
from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient
from quire.frontend.startup import start_engine
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.output import StartupStatus


class InlineEngineLoader:
    """Makes one engine, once."""

    def __init__(self) -> None:
        self._is_loading = False
        self.status = StartupStatus("starting the engine")

    async def start(self, config: EngineConfig) -> tuple[EngineClient, Tokenizer | None]:
        """Raises what `start_engine` raises."""
        self._is_loading = True
        started: tuple[EngineClient, Tokenizer | None] = await run_in_thread(self._load, config)
        return started

    def _load(self, config: EngineConfig) -> tuple[EngineClient, Tokenizer | None]:
        try:
            return start_engine(config, report=self._note)
        finally:
            self._is_loading = False

    def _note(self, stage: str, share: float) -> None:
        self.status = StartupStatus(stage, share)

    def leave_behind(self, status: int) -> None:
        """End the process at once if the model still loads: the interpreter must not shut down under the thread."""
        if self._is_loading:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)
