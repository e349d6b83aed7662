"""Server-sent events, and client disconnects.

Knows bytes, ASGI messages and time. Does not know the content of a frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from quire.server.errors import ENDS, as_api_error, envelope

T = TypeVar("T")
Produced = TypeVar("Produced", covariant=True)
Encoded = TypeVar("Encoded", contravariant=True)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS_AFTER_S = 2.0  # a stream answers 200 at the latest then; errors before are HTTP errors
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer the stream
]


def data(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def event(body: dict[str, Any]) -> bytes:
    """A frame whose event name is its body's `type`."""
    return b"event: " + str(body["type"]).encode() + b"\n" + data(body)


async def hung_up(receive: Receive) -> None:
    """Return when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectGuard:
    """Code within `with` ends with ClientDisconnect when the client disconnects. `close` it at the end.

    It listens all the time, also between two `with`: a server reports a disconnect only once.
    """

    def __init__(self, receive: Receive):
        self._listener = asyncio.ensure_future(hung_up(receive))
        self._task: asyncio.Task[Any] | None = None
        self._has_cut = False

    def __enter__(self) -> None:
        if self._listener.done():
            raise ClientDisconnect
        self._task = asyncio.current_task()
        self._listener.add_done_callback(self._cut)

    def _cut(self, _: object) -> None:
        if self._task is not None:
            self._has_cut = self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._listener.remove_done_callback(self._cut)
        # `_cut` may be scheduled already: it must not cancel what comes after.
        task, self._task = self._task, None
        if self._has_cut and task is not None:
            others = task.uncancel()
            if kind is asyncio.CancelledError and not others:
                raise ClientDisconnect

    def close(self) -> None:
        self._listener.cancel()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first.

    Raises:
        ClientDisconnect: the client is gone.
    """
    hang_up = DisconnectGuard(receive)
    try:
        with hang_up:
            return await work
    finally:
        hang_up.close()


class EventSource(Protocol[Produced]):
    """Produces what a stream sends."""

    ended: bool

    async def open(self) -> None:
        """Start. Called once."""

    async def next(self) -> Iterable[Produced]:
        """The new items, as soon as there are any. May be cancelled, and called again."""

    def close(self) -> None: ...


class EventEncoder(Protocol[Encoded]):
    """Encodes items as frames. `keep_alive` is sent while there are none."""

    media_type: bytes = b"text/event-stream; charset=utf-8"
    keep_alive: bytes = KEEP_ALIVE

    def add(self, item: Encoded, /) -> Iterable[bytes]:
        """The frames of an item."""

    def end(self) -> Iterable[bytes]:
        """The last frames."""

    def failed(self, error: BaseException) -> bytes:
        """The last frames of a stream that failed."""
        return data(envelope(as_api_error(error))) + DONE


class EventStream:
    """An ASGI answer that sends frames as they come. `prepare` first, so that an early error is still an HTTP error.

    Everything runs in the request's own task: a token costs one task switch and one message. Frames that are ready at
    the same time are sent together.
    """

    def __init__(
        self,
        source: EventSource[Any],
        encoder: EventEncoder[Any],
        receive: Receive,
        keep_alive: float = 0,
    ):
        self.source, self.encoder, self.keep_alive = source, encoder, keep_alive
        self.headers = [(b"content-type", encoder.media_type), *HEADERS]
        self._hang_up = DisconnectGuard(receive)
        self._first: bytes | None = None
        self._ended = False

    async def prepare(self) -> None:
        """Wait a short time for the first frames.

        Raises:
            ClientDisconnect: the client is gone.
            Exception: any error in making them.
        """
        try:
            with self._hang_up:
                await self.source.open()
                patience = min(self.keep_alive or HEADERS_AFTER_S, HEADERS_AFTER_S)
                self._first = await self._within(patience)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._hang_up.close()
        self.source.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._hang_up:
                await send({"type": "http.response.start", "status": 200, "headers": self.headers})
                frames = self._first or await self._next(send)
                while not self._ended:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                    frames = await self._next(send)
                await send({"type": "http.response.body", "body": frames, "more_body": False})
        except (ClientDisconnect, OSError):
            pass  # a broken socket is a disconnect too
        finally:
            self.close()

    async def _next(self, send: Send) -> bytes:
        """The next frames; sends comments until there are some."""
        try:
            if not self.keep_alive:
                return await self._following()
            while (frames := await self._within(self.keep_alive)) is None:
                await send(
                    {
                        "type": "http.response.body",
                        "body": self.encoder.keep_alive,
                        "more_body": True,
                    }
                )
            return frames
        except (OSError, *ENDS):
            raise
        except BaseException as error:
            self._ended = True
            return self.encoder.failed(error)

    async def _within(self, seconds: float) -> bytes | None:
        """The next frames; None: not within `seconds`."""
        try:
            async with asyncio.timeout(seconds) as clock:
                return await self._following()
        except TimeoutError:
            if not clock.expired():
                raise  # of another timeout
            return None

    async def _following(self) -> bytes:
        frames: list[bytes] = []
        while not (frames or self._ended):
            for item in await self.source.next():
                frames += self.encoder.add(item)
            if self.source.ended:
                self._ended = True
                frames += self.encoder.end()
        return b"".join(frames)
