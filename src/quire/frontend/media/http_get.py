"""One GET request over HTTP/1.1, to an address that the caller has resolved and checked.

Knows a connection and the frames of an answer (`httptools`). Follows no redirect, keeps no connection, reads no proxy
variables, and sends nothing but the host's name.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import httptools

from quire.frontend.media.addresses import WebAddress
from quire.version import __version__

PIECE = 64 << 10
MOST_HEAD = 64 << 10


class BadAnswer(Exception):
    """The answer is not HTTP, or has no plain body; the message says so in words of ours."""


class WebAnswer:
    """Status, place of a redirect, body; filled by the parser's calls."""

    def __init__(self, take: Callable[[int], None]):
        self.status, self.location, self.encoding = 0, "", ""
        self.complete = self.says_its_end = False
        self.parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._head, self._take = 0, take
        self._error: Exception | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def feed(self, data: bytes) -> None:
        """Raises BadAnswer; and what `take` raises: the body is too long."""
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as why:
            raise (self._error or BadAnswer("the host's answer is not HTTP")) from why
        if not self.status:
            self._head += len(data)
            if self._head > MOST_HEAD:
                raise BadAnswer("the head of the host's answer is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MOST_HEAD:
            self._error = BadAnswer("the head of the host's answer is too long")
            raise self._error
        match name.lower():
            case b"location":
                self.location = value.decode("latin-1")
            case b"content-encoding":
                self.encoding = value.decode("latin-1").strip().lower()
            case b"content-length" if value.isdigit():
                self.says_its_end = True
                self._counted(int(value), keep=False)
            case b"transfer-encoding":
                self.says_its_end = True

    def on_headers_complete(self) -> None:
        self.status = int(self.parser.get_status_code())
        if self.status == 200 and self.encoding not in ("", "identity"):
            self._error = BadAnswer("the host sends a compressed body, which was not asked for")
            raise self._error

    def on_body(self, data: bytes) -> None:
        if self.status == 200:
            self._counted(len(data))
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self.complete = True

    def _counted(self, count: int, keep: bool = True) -> None:
        try:
            self._take(count)
        except Exception as error:
            self._error = error
            raise
        if not keep:
            self._take(-count)  # it only must not be too long


async def get(address: WebAddress, family: int, ip: str, take: Callable[[int], None]) -> WebAnswer:
    """The answer of the host at this IP address. `take`: called with the size of each part of the body; may raise.

    Raises:
        BadAnswer, OSError; and what `take` raises.
    """
    context = _context() if address.scheme == "https" else None
    name = address.host if context is not None else None
    reader, writer = await asyncio.open_connection(
        ip, address.port, family=family, ssl=context, server_hostname=name, limit=PIECE
    )
    try:
        writer.write(
            f"GET {address.target} HTTP/1.1\r\nHost: {address.host_header}\r\nUser-Agent: quire/{__version__}\r\n"
            "Accept: image/*, */*;q=0.5\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n".encode()
        )
        answer = WebAnswer(take)
        while not answer.complete and (data := await reader.read(PIECE)):
            answer.feed(data)
            if answer.status and answer.status != 200:
                return answer
        if not answer.status:
            raise BadAnswer("the host closes the connection without an answer")
        if answer.says_its_end and not answer.complete:
            raise BadAnswer("the host's answer is incomplete")
        return answer
    finally:
        writer.transport.abort()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


@cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()
