"""The frontend's side of sleep mode: it blocks new requests, waits for the running ones, then pauses the engine.

Knows the named functions of `sleep.py`, which it reaches through an awaitable `call`. A caller that fails or stops
waiting releases its own hold and no other.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from quire.engine.sleep import PAUSE, SLEEP, checked_level, checked_mode
from quire.errors import Conflict, QuireError

EngineCall = Callable[..., Awaitable[Any]]


async def pause(call: EngineCall, mode: str) -> None:
    """Block new requests from now on, and return when no request runs that must end first.

    Raises:
        ValidationError: an unknown mode.
        Conflict: another caller resumed the engine in the meantime.
    """
    async with holding(call, checked_mode(mode), PAUSE) as holder:
        check_held(await call("pause", holder))


async def sleep(call: EngineCall, level: int, mode: str) -> None:
    """Like `pause`, but also free memory.

    Raises:
        ValidationError: an unknown level or mode.
        Conflict: another caller woke up the engine in the meantime.
    """
    checked_level(level)
    async with holding(call, checked_mode(mode), SLEEP) as holder:
        check_held(await call("sleep", level, holder))


async def release(call: EngineCall) -> None:
    """Free only the KV cache.

    Raises:
        Conflict: the engine is not paused, or has already freed memory.
    """
    check_released(await call("release_kv_cache"))


@asynccontextmanager
async def holding(call: EngineCall, mode: str, reason: str) -> AsyncIterator[str]:
    """Block new requests; the body runs when all requests that may go on have ended."""
    holder = uuid.uuid4().hex
    hold: asyncio.Future[Any] = asyncio.ensure_future(call("hold", mode, reason, holder))
    try:
        await asyncio.shield(hold)
        check_held(await call("drained", holder))  # answered when that is known
        yield holder
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(_release(call, holder, hold)))
        raise


async def _release(call: EngineCall, holder: str, hold: asyncio.Future[Any]) -> None:
    with suppress(QuireError):  # an engine that is gone has no holds
        await hold  # `hold` may still run in another thread, and `release_hold` must come after it
    with suppress(QuireError):
        await call("release_hold", holder)  # also answers `drained`


@contextmanager
def holding_inline(call: Callable[..., Any], mode: str, reason: str) -> Iterator[str]:
    """Like `holding`, for a caller that runs the engine's steps itself: the body must finish those requests."""
    holder = uuid.uuid4().hex
    try:
        call("hold", mode, reason, holder)
        yield holder
    except BaseException:
        with suppress(QuireError):
            call("release_hold", holder)
        raise


def check_held(is_held: bool) -> None:
    """Raises Conflict."""
    if not is_held:
        raise Conflict(
            "the engine was resumed or restarted before its running requests had finished; try again"
        )


def check_released(why_not: str | None) -> None:
    """Raises Conflict."""
    if why_not is not None:
        raise Conflict(why_not)
