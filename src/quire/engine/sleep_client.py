"""How a front room puts an engine to rest: it holds requests back, waits for what may still end, and then makes it stand.

Knows the named functions of `sleep.py`, reached through an awaitable `call`. Who gives up waiting, or fails, lets go of
what he himself held, and of nothing else.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from quire.engine.sleep import PAUSE, SLEEP, checked_level, checked_mode
from quire.errors import Conflict, QuireError

LOOK_EVERY_S = 0.02

Ask = Callable[..., Awaitable[Any]]


async def pause(call: Ask, mode: str) -> None:
    """Until nobody runs who may not; new requests wait from now on.

    Raises:
        ValidationError: no such mode.
        Conflict: somebody resumed meanwhile.
    """
    async with holding(call, checked_mode(mode), PAUSE) as holder:
        check_stands(await call("pause", holder))


async def sleep(call: Ask, level: int, mode: str) -> None:
    """As `pause`, and then give memory back.

    Raises:
        ValidationError: no such level or mode.
        Conflict: somebody woke it up meanwhile.
    """
    checked_level(level)
    async with holding(call, checked_mode(mode), SLEEP) as holder:
        check_stands(await call("sleep", level, holder))


async def release(call: Ask) -> None:
    """Give back the KV cache alone.

    Raises:
        Conflict: the engine is at work, or has given memory back already.
    """
    check_released(await call("release_kv_cache"))


@asynccontextmanager
async def holding(call: Ask, mode: str, reason: str) -> AsyncIterator[str]:
    """Hold requests back; inside, nobody is left who may go on."""
    holder = uuid.uuid4().hex
    asked: asyncio.Future[Any] = asyncio.ensure_future(call("hold", mode, reason, holder))
    try:
        left = await asyncio.shield(asked)
        while left:
            await asyncio.sleep(LOOK_EVERY_S)
            left = await call("left", holder)
        check_stands(left is not None)
        yield holder
    except BaseException:
        await asyncio.shield(asyncio.ensure_future(_let_go(call, holder, asked)))
        raise


async def _let_go(call: Ask, holder: str, asked: asyncio.Future[Any]) -> None:
    with suppress(QuireError):  # an engine that is gone holds nobody
        await asked  # in another thread, perhaps: it must not come after this
    with suppress(QuireError):
        await call("let_go", holder)


@contextmanager
def by_turns(call: Callable[..., Any], mode: str, reason: str) -> Iterator[str]:
    """As `holding`, for one who steps the engine himself: inside he sees to the end of those who may go on."""
    holder = uuid.uuid4().hex
    try:
        call("hold", mode, reason, holder)
        yield holder
    except BaseException:
        with suppress(QuireError):
            call("let_go", holder)
        raise


def check_stands(held: bool) -> None:
    """Raises Conflict."""
    if not held:
        raise Conflict(
            "somebody let the engine go on, or it was started again, before all that ran had ended: ask again"
        )


def check_released(why_not: str | None) -> None:
    """Raises Conflict."""
    if why_not is not None:
        raise Conflict(why_not)
