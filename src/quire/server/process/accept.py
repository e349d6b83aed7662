"""Accepts connections: keeps the last descriptors of the process free, and prefers a new connection to an idle one.

Each connection is an open file. With none left, the server could accept no connection, and start no engine process
in place of a dead one. Knows sockets and descriptors. Does not know HTTP, except for one refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from ssl import SSLContext

from quire.logging import get_logger
from quire.server.process.connection import Connection

log = get_logger(__name__)

MOST_FILES = 1 << 16
RESERVED_FILES = 64
"""Descriptors that connections leave free: an engine process takes about 20 to start, and the server reads files."""
MAX_ACCEPTS = 64  # connections to accept before other work of the loop
RETRY_S = 0.2
HANDSHAKE_S = 30.0  # limit of a TLS handshake
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 20\r\n\r\ntoo many connections"
)


def allow_files(most: int = MOST_FILES) -> int:
    """Raise the limit of open files, usually 1,024, as far as this process may, and return it.

    Not above `most`: some systems allow a billion, and some libraries close them one by one.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return most if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def most_descriptors(files: int) -> int:
    """The first descriptor number that no connection gets; `files`: the limit of open files."""
    return files - min(RESERVED_FILES, files // 4)


class Acceptor:
    """Accepts the connections of one listening socket. Has the `close` and `wait_closed` of an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        tls: SSLContext | None,
        waiting: dict[Connection, None],
        files: int,
    ):
        """`waiting`: connections that may be closed to make room. `files`: the limit of open files."""
        self.listener, self.connect, self.tls, self.waiting = listener, connect, tls, waiting
        self.most = most_descriptors(files)
        self.opening: dict[asyncio.Task[object], None] = {}
        """Connections that are being set up: a TLS handshake takes time."""
        self.loop = asyncio.get_running_loop()

    def start(self, backlog: int) -> None:
        self.listener.setblocking(False)
        self.listener.listen(backlog)
        self.loop.add_reader(self.listener.fileno(), self._accept)

    def close(self) -> None:
        if self.listener.fileno() >= 0:
            self.loop.remove_reader(self.listener.fileno())
        for task in list(self.opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """There is nothing to wait for."""

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                is_full = lowest_free(self.listener) >= self.most  # all below are taken
                if is_full and self._make_room():
                    return  # the loop's next turn frees the descriptor
                accepted, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor at all, or no memory for one
                log.warning_every("accept", 60, "cannot accept connections: %s", error)
                self._make_room()
                self.loop.remove_reader(self.listener.fileno())
                self.loop.call_later(RETRY_S, self._again)
                return
            if is_full:
                refuse(accepted, self.tls is None)
            else:
                self._open(accepted)

    def _again(self) -> None:
        if self.listener.fileno() >= 0:
            self.loop.add_reader(self.listener.fileno(), self._accept)

    def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience = None if self.tls is None else HANDSHAKE_S
        task: asyncio.Task[object] = self.loop.create_task(
            self.loop.connect_accepted_socket(
                self.connect, accepted, ssl=self.tls, ssl_handshake_timeout=patience
            )
        )
        self.opening[task] = None
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        self.opening.pop(task, None)
        if not task.cancelled():
            task.exception()  # a failed handshake concerns only its client

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for longest, else the oldest handshake."""
        log.warning_every(
            "descriptors", 60, "%d files are open: the server closes idle connections to accept new ones;"
            " raise the limit of open files (ulimit -n)", self.most,
        )  # fmt: skip
        if self.waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.transport.abort()
            return True
        if self.opening:
            if self.tls is not None:
                next(iter(self.opening)).cancel()
            return True  # without TLS, they are in `waiting` after the loop's next turn
        return False


def lowest_free(listener: socket.socket) -> int:
    """The number of the next descriptor: the system uses the lowest free one."""
    number = os.dup(listener.fileno())
    os.close(number)
    return number


def refuse(accepted: socket.socket, says_why: bool) -> None:
    """Answer 503 and close. Reads what the client sent: closing a socket with unread bytes would reset the connection."""
    with contextlib.suppress(OSError):
        accepted.setblocking(False)
        if says_why:
            accepted.send(REFUSAL)
            accepted.recv(1 << 16)
    accepted.close()
