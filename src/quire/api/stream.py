"""The output stream of one request, as `AsyncLLM.open` returns it.

Knows the OutputProcessor of a request. Does not know event loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import RequestOutput, error_of

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM


class OutputStream:
    """One request's outputs without an async iterator: the caller waits in its own way and calls `take`."""

    def __init__(self, llm: AsyncLLM, collector: OutputProcessor, heard: Callable[[], None]):
        self.llm, self.collector, self.heard = llm, collector, heard
        self.ended = False
        """No more output will come."""

    def take(self) -> RequestOutput | None:
        """The new output; None: there is none yet, or the stream has ended.

        Raises:
            QuireError: the request failed.
            EngineDeadError: the engine has stopped.
        """
        output = self.collector.take()
        self.ended = self.collector.finished
        if output is None:
            if not self.ended:
                self.llm.check_alive()
        elif self.collector.failed and (error := error_of(output)) is not None:
            raise error
        return output

    def close(self) -> None:
        """Abort the request if it still runs."""
        self.llm.closed(self)
