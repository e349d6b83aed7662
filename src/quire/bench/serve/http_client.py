"""HTTP client for many concurrent exchanges with little CPU time, which records when each piece of a body arrives.

Knows HTTP/1.1 over TCP and TLS, and keeps connections open. Does not know what a body contains. The load
generator shares the machine with the server under test, so a piece costs a parser call and no task switch; its
time is taken when its bytes arrive, before they are parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, QuireError

OnPiece = Callable[[bytes, float], None]
"""Called with a piece of a body and its arrival time (seconds of time.perf_counter)."""


class HttpFailed(QuireError):
    """There was no response, or an incomplete one."""


class ConnectionRefused(HttpFailed):
    """Nothing listens at the address."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes  # empty if the pieces went to `on_piece`


class HttpConnection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[HttpAnswer] | None = None
        self.open = False

    def ask(self, request: bytes, on_piece: OnPiece | None) -> asyncio.Future[HttpAnswer]:
        self.parser = httptools.HttpResponseParser(self)
        self.on_piece, self.parts, self.status = on_piece, list[bytes](), 0
        self.started = self.bounded = False
        self.when = 0.0
        self.done = asyncio.get_running_loop().create_future()
        if self.transport is None or not self.open:
            self.done.set_exception(HttpFailed("the connection is closed"))
        else:
            self.transport.write(request)
        return self.done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self.when, self.started = time.perf_counter(), True
        if self.done is None or self.done.done():
            self.close()  # unexpected data
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as why:
            self._end(HttpFailed(f"not an HTTP response: {why}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self.status and not self.bounded and error is None:
            # a body without a length ends with the connection
            self._end(HttpAnswer(self.status, b"".join(self.parts)))
        elif self.done is not None:
            self._end(HttpFailed(f"the connection was closed{f': {error}' if error else ''}"))

    # called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.bounded |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self.on_piece is not None and self.status == 200:
            self.on_piece(piece, self.when)
        else:
            self.parts.append(piece)

    def on_message_complete(self) -> None:
        if 100 <= self.status < 200:
            return
        if not self.parser.should_keep_alive():
            self.open = False
        self._end(HttpAnswer(self.status, b"".join(self.parts)))

    def _end(self, how: HttpAnswer | HttpFailed) -> None:
        if self.done is None or self.done.done():
            return
        if isinstance(how, HttpAnswer):
            self.done.set_result(how)
        else:
            self.done.set_exception(how)


class HttpTarget:
    """A server's address, and the open connections to it. `async with` closes them at the end."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str] | None = None, insecure: bool = False
    ):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url}: must be an address such as http://127.0.0.1:8000")
        self.host, self.base = parts.hostname, parts.path.rstrip("/")
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.secure: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self.secure = ssl.create_default_context()
            if insecure:
                self.secure.check_hostname, self.secure.verify_mode = False, ssl.CERT_NONE
        fields = {
            "Host": parts.netloc.rpartition("@")[2],
            **(headers or {}),
        }
        self.fields = "".join(f"{name}: {_line(value)}\r\n" for name, value in fields.items())
        self.idle: list[HttpConnection] = []
        self.links: set[HttpConnection] = set()

    async def __aenter__(self) -> HttpTarget:
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self.links:
            link.close()
        self.links.clear()
        self.idle.clear()
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        on_piece: OnPiece | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 6 * 3600.0,
    ) -> HttpAnswer:
        """One exchange. `on_piece` gets the pieces of a response with status 200 as they arrive.

        Raises:
            HttpFailed: no connection, a broken one, not HTTP, or `timeout` seconds have passed.
        """
        given = {"Content-Type": "application/json", **(headers or {})}
        more = "".join(f"{name}: {_line(value)}\r\n" for name, value in given.items())
        head = f"{method} {self.base}{path} HTTP/1.1\r\n{self.fields}{more}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        try:
            async with asyncio.timeout(timeout):
                while True:
                    link, used = await self._link()
                    try:
                        answer = await link.ask(request, on_piece)
                    except HttpFailed:
                        self._drop(link)
                        if used and not link.started:
                            continue  # the server closed it while idle: retry on another
                        raise
                    except BaseException:
                        self._drop(link)  # the rest of the response may still arrive on it
                        raise
                    self._keep(link)
                    return answer
        except TimeoutError:
            raise HttpFailed(f"no response within {timeout:g} s") from None

    async def json(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The decoded body of a response. Raises HttpFailed also for a status other than 200."""
        import msgspec

        data = b"" if body is None else msgspec.json.encode(body)
        answer = await self.ask(method, path, data, **options)
        if answer.status != 200:
            raise HttpFailed(f"{path}: {answer.status}: {reason(answer.body)}")
        try:
            return msgspec.json.decode(answer.body)
        except msgspec.DecodeError as why:
            raise HttpFailed(f"{path}: not JSON: {why}") from None

    async def _link(self) -> tuple[HttpConnection, bool]:
        while self.idle:
            link = self.idle.pop()
            if link.open:
                return link, True
            self.links.discard(link)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_connection(
                HttpConnection, self.host, self.port, ssl=self.secure
            )
        except OSError as why:
            kind = ConnectionRefused if isinstance(why, ConnectionRefusedError) else HttpFailed
            raise kind(f"{self.host}:{self.port}: {why}") from why
        self.links.add(link)
        return link, False

    def _keep(self, link: HttpConnection) -> None:
        if link.open:
            self.idle.append(link)
        else:
            self._drop(link)

    def _drop(self, link: HttpConnection) -> None:
        link.close()
        self.links.discard(link)


def _line(value: str) -> str:
    if "\r" in value or "\n" in value:
        raise ConfigError(f"a header contains a line break: {value!r}")
    return value


def reason(body: bytes) -> str:
    """The message of an error response, in any format."""
    import msgspec

    text = body.decode("utf-8", "replace")
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, AttributeError):
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        text = str(error["message"] if isinstance(error, dict) else error)
    return text.strip()[:500] or "empty body"
