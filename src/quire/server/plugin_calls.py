"""PluginCalls: runs the code of parser plug-ins, which may be slow, raise anything, or never return.

Each call has a thread of its own and a limit of time, so the event loop stays free, and an error is one request's. A thread cannot
be ended: a call that never returns keeps it, and after MOST of these all further calls are refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from quire.api.run_in_thread import run_in_thread
from quire.errors import QuireError
from quire.logging import get_logger

log = get_logger(__name__)

SECONDS = 10.0  # for the text of one delta, or of a whole answer
MOST = 64  # calls at once

P = ParamSpec("P")
T = TypeVar("T")


class PluginFailed(QuireError):
    """A parser plug-in failed on an output; the log has its traceback. HTTP 500."""


class PluginCalls:
    """One for each server; any event loop may call it."""

    def __init__(self, seconds: float = SECONDS, most: int = MOST):
        self.seconds, self.most, self.running = seconds, most, 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What the call returns.

        Raises:
            QuireError: as the call raises it. PluginFailed: it raises anything else, takes too long, or too many run.
        """
        with self._lock:
            if self.running >= self.most:
                raise PluginFailed(
                    f"{self.running} calls of parser plug-ins (--tool-parser-plugin, --reasoning-parser-plugin) have not returned"
                )
            self.running += 1

        def guarded() -> T:
            try:
                return call(*args, **keywords)
            except QuireError:
                raise
            except BaseException as error:  # SystemExit would end the server
                log.exception("a parser plug-in failed")
                raise PluginFailed(
                    f"a parser plug-in (--tool-parser-plugin, --reasoning-parser-plugin) raised {type(error).__name__}; the"
                    " server's log has the traceback"
                ) from None
            finally:
                with self._lock:
                    self.running -= 1

        try:
            async with asyncio.timeout(self.seconds):
                result: T = await run_in_thread(guarded)
                return result
        except TimeoutError:
            raise PluginFailed(
                f"a parser plug-in (--tool-parser-plugin, --reasoning-parser-plugin) did not return within {self.seconds:g} s"
            ) from None
