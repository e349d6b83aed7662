"""What requests that generate and requests that pool have in common: names in the engine, the log, outputs and refusals.

Knows one request of the engine. Does not know HTTP requests, which may have several.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from quire.api.async_engine import OutputStream
from quire.errors import QueueFull, ValidationError
from quire.frontend.beam_search import BeamStream
from quire.frontend.prompts import Prompt
from quire.logging import get_logger
from quire.observe.prometheus import REQUESTS, TOKENS
from quire.protocol.request import RequestParams
from quire.server.adapters import unloaded_meanwhile
from quire.server.errors import ApiError
from quire.server.state import ServerState

log = get_logger(__name__)


class Wakeup:
    """Wakes one waiting task. An asyncio.Event, which allows several, costs three times as much."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Safe to cancel: it stays set until a wait returns."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_set = False


def prompt_ids(state: ServerState, request_id: str, which: int, count: int) -> tuple[str, str]:
    """The ids of one of the `count` prompts of a request: for the user; and in the engine, where no other request has it."""
    public = name = request_id if count == 1 else f"{request_id}-{which}"
    if state.fronts > 1:  # clients of other HTTP processes choose ids too
        name = shared_name(name, state.front)
    return public, f"{name}-{secrets.token_hex(4)}" if name in state.active else name


def log_request(state: ServerState, name: str, prompt: Prompt, params: RequestParams) -> None:
    """A line in the log, with --enable-log-requests."""
    if not state.config.observe.enable_log_requests:
        return
    most = state.config.observe.max_log_len
    text = None if prompt.text is None else prompt.text[:most]
    log.info(
        "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
        name, text, prompt.tokens[:most], params,
    )  # fmt: skip


def new_output(stream: OutputStream | BeamStream, state: ServerState, adapter: str | None) -> Any:
    """What `stream` gives; a refusal is counted.

    Raises:
        ApiError: 404: `adapter` was unloaded before the request reached the engine.
        QuireError: the request failed.
    """
    try:
        return stream.take()
    except QueueFull as error:
        state.metrics.refused(TOKENS if TOKENS in str(error) else REQUESTS)
        raise
    except ValidationError as error:
        raise unloaded_meanwhile(error, adapter) or error from None


def out_of_time(seconds: float | None) -> ApiError:
    return ApiError(
        408, f"the request did not finish within {seconds:g} s (`timeout`)", param="timeout"
    )


def shared_name(name: str, front: int) -> str:
    """The id of a request in an engine that several HTTP processes share."""
    return f"{name}@{front}"


def own_name(shared: str) -> str:
    """The inverse of `shared_name`, also for ids that the frontend derived from it."""
    return shared.rpartition("@")[0]
