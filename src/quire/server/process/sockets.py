"""Listening sockets and the HTTP library: addresses, and the limits before a request exists.

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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire import env
from quire.config.server import ServerConfig
from quire.errors import ConfigError
from quire.processes.port_holder import port_holder
from quire.server.process.accept import MOST_FILES, Acceptor, allow_files
from quire.server.process.connection import HEAD_BYTES, Connection

LOOPBACK = "127.0.0.1"
LOOPBACKS = (LOOPBACK, "localhost", "::1")
BACKLOG = 2048
KEEP_ALIVE_S = 100
"""How long a connection may be idle: longer than clients and proxies keep theirs (httpx 5 s, aiohttp 15, nginx 60, Go
90). If the server closed first, or at the same time, a request on its way would fail.
"""
MOST_MESSAGE = 4 << 20  # bytes of a WebSocket message: a minute of sound
TICK_S = 0.1  # how often uvicorn calls `on_tick`
CHECK_EVERY_S = 1.0
"""How often the time limits of connections are checked, unless a limit is shorter."""
LAST_ANSWERS_S = 3  # limit for writing the last answers when all else has ended


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: `launch.py` decides when it ends. Accepts with `Acceptor`."""

    def __init__(self, config: uvicorn.Config, waiting: dict[Connection, None], shortest_s: float):
        """`waiting`: see `Connection`. `shortest_s`: the shortest time limit of connections."""
        super().__init__(config)
        self.waiting, self.files = waiting, MOST_FILES
        self.check_ticks = max(1, round(min(shortest_s / 4, CHECK_EVERY_S) / TICK_S))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.files = allow_files()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        protocol: Any = self.config.http_protocol_class
        connect = partial(
            protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )  # fmt: skip
        acceptors = [
            Acceptor(listener, connect, self.config.ssl, self.waiting, self.files)
            for listener in sockets or ()
        ]
        for acceptor in acceptors:
            acceptor.start(self.config.backlog)
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # of clients that do not read
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if counter % self.check_ticks == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):  # a WebSocket has pings
                    connection.check(now)
        return await super().on_tick(counter)


class PathFilter(logging.Filter):
    """Keeps some paths out of the access log."""

    def __init__(self, paths: str, root: str = ""):
        """`root`: the log's prefix of each path."""
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


def bind(server: ServerConfig, options: str = "--host or --port") -> socket.socket:
    """The listening socket; bound before anything is loaded, so that a mistake costs no time. `options`: choose the address.

    Raises:
        ConfigError: the address is taken, or not one of this machine.
    """
    if server.uds is not None:
        return bind_unix(server.uds)
    host, listener = host_of(server), None
    try:
        info = socket.getaddrinfo(host, server.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {server.port}: {reason}{port_holder(server.port)}; choose another with {options}"
        ) from error
    listener.set_inheritable(False)
    return listener


def bind_all(server: ServerConfig, count: int) -> list[socket.socket]:
    """A listening socket for each of `count` processes, all at one address: the kernel distributes connections.

    A unix socket is one for all of them. Raises: as `bind`.
    """
    first = bind(server)  # still without SO_REUSEPORT: it fails if the address is taken
    if server.uds is not None:
        return [first] * count
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sockets = [first]
    try:
        for _ in range(count - 1):
            sockets.append(bind_beside(first.family, first.getsockname()))
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise ConfigError(
            f"cannot listen with {count} processes: {error.strerror or error}; use --api-server-count 1"
        ) from error
    return sockets


def bind_beside(family: int, name: Any) -> socket.socket:
    """A listening socket at an address that this server has bound already. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(name)
    except OSError:
        listener.close()
        raise
    return listener


def bind_unix(path: str) -> socket.socket:
    """A unix socket; replaces the file of a dead server."""
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise ConfigError(f"another server is listening on {path}; choose another --uds")
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


def http_server(app: ASGIApp, server: ServerConfig) -> UvicornServer:
    """uvicorn around the application, not started."""
    waiting: dict[Connection, None] = {}
    limits = {
        "head_bytes": server.h11_max_incomplete_event_size or HEAD_BYTES,
        "receive_timeout": server.receive_timeout,
        "send_timeout": server.send_timeout,
        "waiting": waiting,
    }
    protocol = type("LimitedConnection", (Connection,), limits)
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
        ws="websockets-sansio" if find_spec("websockets") else "none",
        ws_max_size=MOST_MESSAGE,
        ws_max_queue=4,
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
    # The page fetches the engine's state four times a second.
    quiet = f"/ui/state,{server.disable_access_log_for_endpoints or ''}"
    logging.getLogger("uvicorn.access").addFilter(PathFilter(quiet, server.root_path or ""))
    # uvicorn logs through Quire's handlers.
    quire_log, uvicorn_log = logging.getLogger("quire"), logging.getLogger("uvicorn")
    uvicorn_log.handlers, uvicorn_log.propagate = list(quire_log.handlers), False
    times = [seconds for seconds in (server.receive_timeout, server.send_timeout) if seconds]
    return UvicornServer(config, waiting, min(times, default=KEEP_ALIVE_S))
