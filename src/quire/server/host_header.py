"""The header Host: the names under which requests may reach the server.

With DNS rebinding, a browser resolves a foreign name to this machine's address, takes that name's page for the
server's own, and lets its scripts call the API. Its requests carry the foreign name. Knows names and addresses. Does
not know routes, except the probes' routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from socket import socket

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server import ServerConfig
from quire.server.errors import ApiError

ANY = "*"
PROBES = frozenset(("/health", "/health/live", "/health/ready", "/health/startup", "/ping"))
"""Paths that answer under every name: probes use the address of a pod, and the answers reveal nothing."""


def allowed_hosts(server: ServerConfig, listener: socket) -> frozenset[str] | None:
    """Names that the header Host may have; None: any.

    Without --allowed-hosts, names are restricted only if nothing else keeps a foreign page out: on a loopback address
    without a key.
    """
    if server.allowed_hosts:
        names = frozenset(name.lower() for name in server.allowed_hosts)
        return None if ANY in names else names
    if server.uds is not None or server.needs_key or not is_loopback(listener.getsockname()[0]):
        return None
    return frozenset({(server.host or "localhost").lower()})


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def name_of(host: str) -> str:
    """The name in a header Host, without its port: `[::1]:8000` -> `::1`."""
    host = host.strip().lower()
    if host.startswith("["):
        address, _, port = host[1:].partition("]")
        return address if not port or port.startswith(":") else host
    return host.partition(":")[0].removesuffix(".")


class KnownHosts:
    """Answers 403 to a request for a name that is not allowed. Loopback names and addresses are always allowed."""

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str], refusal: Callable[[Scope, ApiError], Response]
    ):
        self.app, self.refusal = app, refusal
        self.names = frozenset(host for host in hosts if not host.startswith("*."))
        self.ends = tuple(host[1:] for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or get_route_path(scope) in PROBES:
            await self.app(scope, receive, send)
            return
        # A browser always sends the header, once; a program that sends none is not a browser.
        names = [name_of(host) for host in Headers(scope=scope).getlist("host")]
        if all(self._is_known(name) for name in names):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            403,
            "the header Host has an unknown name; to allow it, start the server with --allowed-hosts NAME, or with an"
            " API key",
        )
        await self.refusal(scope, error)(scope, receive, send)

    def _is_known(self, name: str) -> bool:
        return name in self.names or name.endswith(self.ends) or is_loopback(name)
