"""RedisLink: exchanges with a redis server, each bounded in seconds and in bytes.

Knows addresses, commands and replies. Does not know blocks. The package `redis` speaks the protocol; its timeouts are for each
read of a socket, so a server that sends a byte a second, or never stops, would hold a thread for ever: `BoundedSocket` counts.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix")
CONNECT_S = 1.0
HEADROOM = 1 << 16
"""Bytes that a reply may have besides its values: greetings, errors, lengths."""
READ_BYTES = 1 << 18
MOST_IDLE = 8


class LinkFailure(Exception):
    """The server does not answer in time, or not as a redis server does."""


class RefusedCommand(LinkFailure):
    """The server answered a command with an error, and may answer others."""


class Allowance:
    """Seconds and bytes that are left of an exchange."""

    def __init__(self) -> None:
        self.set(CONNECT_S, HEADROOM)

    def set(self, seconds: float, num_bytes: int) -> None:
        self.end, self.num_bytes = time.monotonic() + seconds, num_bytes + HEADROOM

    def seconds(self) -> float:
        """Raises TimeoutError: there are none."""
        if (left := self.end - time.monotonic()) <= 0:
            raise TimeoutError("no answer in time")
        return left

    def take(self, num_bytes: int) -> None:
        """Raises ConnectionError: there are none."""
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise ConnectionError("a reply with too many bytes")


class BoundedSocket:
    """A socket whose reads and writes end with an allowance. It passes other methods on to the socket."""

    def __init__(self, inner: socket.socket, allowance: Allowance):
        self._inner, self._allowance = inner, allowance

    def recv(self, size: int) -> bytes:
        self._inner.settimeout(self._allowance.seconds())
        data = self._inner.recv(size)
        self._allowance.take(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        self._inner.settimeout(self._allowance.seconds())
        count = self._inner.recv_into(buffer, size)
        self._allowance.take(count)
        return count

    def sendall(self, data: Any) -> None:
        self._inner.settimeout(self._allowance.seconds())
        self._inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def check_url(url: str) -> None:
    """Raises ConfigError: Quire has no store of this kind, or the package that speaks its protocol is missing."""
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in SCHEMES:
        raise ConfigError(
            f"kv_remote_url: must be redis://HOST:PORT, rediss://HOST:PORT (with TLS) or unix:///PATH, not {scheme + colon if colon else 'without one of these'!r}"
        )
    if find_spec("redis") is None:
        raise ConfigError("kv_remote_url: needs a package: pip install quire[redis]")
    try:
        _pool_options(url)
    except ValueError as why:
        raise ConfigError(f"kv_remote_url: {why}") from None


def shown(url: str) -> str:
    """The address without user, password and options."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    place = parts.path if parts.scheme == "unix" or parts.path.strip("/") else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{place}"


def _pool_options(url: str) -> dict[str, Any]:
    from redis.connection import parse_url

    return dict(parse_url(url))  # type: ignore[no-untyped-call]


class RedisLink:
    """Connections to the server at `url`; several threads may use it at once."""

    def __init__(self, url: str):
        self.url = url
        self._idle: deque[Any] = deque()
        self._lock = threading.Lock()
        self._options: dict[str, Any] = {}

    def exchange(
        self, commands: Sequence[tuple[Any, ...]], seconds: float, num_bytes: int = 0
    ) -> list[Any]:
        """The replies to these commands, which are sent at once: bytes, numbers, lists.

        Args:
            seconds: for all of it, a connection included.
            num_bytes: of all values in the replies, at most.

        Raises:
            RefusedCommand: a reply is an error.
            LinkFailure: it did not work.
        """
        connection = None
        try:
            connection = self._take()
            connection.allowance.set(seconds, num_bytes)
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies = [_reply(connection) for _ in commands]
        except Exception as why:  # of a server that is no redis, anything
            if connection is not None:
                connection.disconnect()
            raise LinkFailure(str(why)[:200] or type(why).__name__) from None
        self._give_back(connection)
        if errors := [one for one in replies if isinstance(one, Exception)]:
            raise RefusedCommand(str(errors[0])[:200])
        return replies

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._options = self._options or _pool_options(self.url)
        options = dict(self._options)
        base = options.pop("connection_class", None)
        options |= {
            "socket_timeout": CONNECT_S, "socket_connect_timeout": CONNECT_S,
            "socket_read_size": READ_BYTES, "protocol": 2, "decode_responses": False,
        }  # fmt: skip
        connection = _bounded(base)(**options)
        connection.connect()
        return connection

    def _give_back(self, connection: Any) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
                return
        connection.disconnect()

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = list(self._idle), deque()
        for connection in idle:
            connection.disconnect()


def _reply(connection: Any) -> Any:
    from redis.exceptions import ResponseError

    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as why:
        return why


def _bounded(base: Any) -> Any:
    """The package's kind of connection, with a bounded socket."""
    from redis.connection import Connection

    class BoundedConnection(base or Connection):  # type: ignore[misc]
        def __init__(self, **options: Any):
            self.allowance = Allowance()
            super().__init__(**options)

        def _connect(self) -> BoundedSocket:
            self.allowance.set(CONNECT_S, 0)
            return BoundedSocket(super()._connect(), self.allowance)

    return BoundedConnection
