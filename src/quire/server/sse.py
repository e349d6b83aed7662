"""Server-sent events, and the client who hangs up.

Knows bytes, ASGI messages and time. Does not know what a frame says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.server.errors import as_api_error, envelope

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS_AFTER_S = 2.0  # a stream answers 200 at the latest then; errors before that are real errors
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would collect the stream
]


def data(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def event(body: dict[str, Any]) -> bytes:
    """A frame that is named by its body's `type`."""
    return b"event: " + str(body["type"]).encode() + b"\n" + data(body)


def failed(error: Exception) -> bytes:
    """The end of a stream that cannot go on."""
    return data(envelope(as_api_error(error))) + DONE


async def hung_up(receive: Receive) -> None:
    """Return when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def or_hung_up(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled when the client hangs up first.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await ended(task, gone)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventStream:
    """An ASGI answer: frames as they come. `prepare` first, so that an early error is still an HTTP error."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        keep_alive: float = 0,
        failed: Callable[[Exception], bytes] = failed,
    ):
        self.frames, self.keep_alive, self.failed = frames, keep_alive, failed
        self.headers: list[tuple[bytes, bytes]] = list(HEADERS)
        self._first: asyncio.Future[bytes] | None = None

    async def prepare(self, receive: Receive) -> None:
        """Wait for the first frame, though not for long.

        Raises:
            ClientDisconnect: the client is gone.
            Exception: whatever making the first frame raised.
        """
        self._first = asyncio.ensure_future(anext(self.frames))
        gone = asyncio.ensure_future(hung_up(receive))
        patience = min(self.keep_alive or HEADERS_AFTER_S, HEADERS_AFTER_S)
        try:
            await asyncio.wait(
                {self._first, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():  # heard once: a server need not say it again
                raise ClientDisconnect
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.close()
            raise
        finally:
            # Listening goes on in __call__: the server hands a disconnect to whoever asks.
            await ended(gone)

    async def close(self) -> None:
        if self._first is not None:
            await ended(self._first)
        await self.frames.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(hung_up(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({gone, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except OSError:
            pass  # the socket broke: the same as hanging up
        finally:
            await ended(gone, pump)
            await self.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        try:
            if self._first is not None:
                await self._send(send, await self._kept_alive(send, self._first))
            if self.keep_alive:
                while True:
                    following = asyncio.ensure_future(anext(self.frames))
                    await self._send(send, await self._kept_alive(send, following))
            else:
                async for frame in self.frames:
                    await self._send(send, frame)
        except StopAsyncIteration:
            pass
        except OSError:
            raise
        except Exception as error:
            await self._send(send, self.failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _kept_alive(self, send: Send, coming: asyncio.Future[bytes]) -> bytes:
        try:
            while self.keep_alive:
                done, _ = await asyncio.wait({coming}, timeout=self.keep_alive)
                if done:
                    break
                await self._send(send, KEEP_ALIVE)
            return await coming
        except asyncio.CancelledError:
            await ended(coming)
            raise

    async def _send(self, send: Send, frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})
