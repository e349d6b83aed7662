"""Sockets and the HTTP library: where the server listens, and what it takes before a request exists.

Knows addresses, uvicorn and its limits. Does not know routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from httptools import HttpParserError
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire import env
from quire.config.server import ServerConfig
from quire.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACKS = (LOOPBACK, "localhost", "::1")
BACKLOG = 2048
MOST_FILES = 1 << 16
HEAD_BYTES = 64 << 10  # the most that a request's line and headers may have, unless told otherwise
KEEP_ALIVE_S = 100
"""How long a connection may be idle: longer than clients and proxies keep theirs (httpx 5 s, aiohttp 15, nginx 60, Go 90).
Where we were the first to close, or closed at the same time, a request on its way would find nobody."""
LAST_ANSWERS_S = 3  # what is still being written when everything has ended may take as long


class LimitedHead(HttpToolsProtocol):
    """Refuses a request whose head is too long, or does not come: the library itself would wait and collect
    without end."""

    most = HEAD_BYTES
    patience = 0.0
    """Seconds that a head may take, from the opening of the connection or from its own first byte; 0: any."""
    seen = 0
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(False)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self.seen = 0
        self._expect()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._expect(False)
        super().on_headers_complete()

    def _expect(self, head: bool = True) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if head and self.patience:
            self.timer = self.loop.call_later(self.patience, self.transport.close)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self.seen += size
        if self.seen > self.most:
            raise HttpParserError(f"the head of the request is longer than {self.most} bytes")


class Server(uvicorn.Server):
    """uvicorn without hands on our signals: `launch.py` decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        allow_files()
        await super().serve(sockets)


def allow_files(most: int = MOST_FILES) -> None:
    """Each connection is an open file, and the usual limit of 1,024 is one that this process may raise itself.

    Not above `most`: some systems allow a billion, and some libraries close them all one by one.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Quiet(logging.Filter):
    """Keeps some paths out of the access log."""

    def __init__(self, paths: str, root: str = ""):
        """`root`: what the log has before each path."""
        super().__init__()
        self.paths = frozenset(root + path.strip() for path in paths.split(",") if path.strip())

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in self.paths


def in_container() -> bool:
    return (
        Path("/.dockerenv").exists()
        or Path("/run/.containerenv").exists()
        or env.outer("KUBERNETES_SERVICE_HOST") is not None
    )


def host_of(server: ServerConfig) -> str:
    """The address of --host; without it loopback, or all interfaces where a key is needed or in a container."""
    if server.host is not None:
        return server.host
    return "0.0.0.0" if server.needs_key or in_container() else LOOPBACK


def bind(server: ServerConfig) -> socket.socket:
    """The listening socket; taken before anything is loaded, so that a mistake costs no time.

    Raises:
        ConfigError: the address is taken, or not one of this machine.
    """
    if server.uds is not None:
        return bind_unix(server.uds)
    host, listener = host_of(server), None
    try:
        found = socket.getaddrinfo(host, server.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except OSError as error:
        if listener is not None:
            listener.close()
        why = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {server.port}: {why}; choose another with --host or --port"
        ) from error
    listener.set_inheritable(False)
    return listener


def bind_all(server: ServerConfig, count: int) -> list[socket.socket]:
    """A listening socket for each of `count` processes, all at one address: the kernel deals connections out.

    Of a unix socket there is one, for all of them. Raises: as `bind`.
    """
    first = bind(server)  # alone on its address until here
    if server.uds is not None:
        return [first] * count
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found = [first]
    try:
        for _ in range(count - 1):
            listener = socket.socket(first.family, socket.SOCK_STREAM)
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(first.getsockname())
    except OSError as error:
        for listener in found:
            listener.close()
        raise ConfigError(
            f"cannot listen with {count} processes: {error.strerror or error}; use --api-server-count 1"
        ) from error
    return found


def bind_unix(path: str) -> socket.socket:
    """A socket file; one that a dead server left is replaced."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise ConfigError(f"another server listens on {path}; choose another --uds")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return listener


def address(server: ServerConfig, listener: socket.socket) -> str:
    """The URL under which this machine reaches the server."""
    if server.uds is not None:
        return f"unix:{server.uds}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{host}:{port}"


def http_server(app: ASGIApp, server: ServerConfig) -> Server:
    """uvicorn around the application, not yet running."""
    limits = {
        "most": server.h11_max_incomplete_event_size or HEAD_BYTES,
        "patience": server.receive_timeout,
    }
    protocol = type("Protocol", (LimitedHead,), limits)
    tls: dict[str, Any] = {}
    if server.ssl_certfile is not None:
        tls = {
            "ssl_certfile": server.ssl_certfile,
            "ssl_keyfile": server.ssl_keyfile,
            "ssl_ca_certs": server.ssl_ca_certs,
            "ssl_cert_reqs": server.ssl_cert_reqs,
        }
        if server.ssl_ciphers is not None:
            tls["ssl_ciphers"] = server.ssl_ciphers
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level=server.uvicorn_log_level,
        access_log=not server.disable_uvicorn_access_log,
        root_path=server.root_path or "",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
        backlog=BACKLOG,
        **tls,
    )
    # The page asks for the engine's state four times a second.
    quiet = f"/ui/state,{server.disable_access_log_for_endpoints or ''}"
    logging.getLogger("uvicorn.access").addFilter(Quiet(quiet, server.root_path or ""))
    # uvicorn speaks through our handlers.
    ours, theirs = logging.getLogger("quire"), logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = list(ours.handlers), False
    return Server(config)
