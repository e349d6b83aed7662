"""The layers in front of the routes: request counts, trace context, request ids, API keys.

Knows headers, and paths as the router sees them. Does not know endpoints, except the few that need no key.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.http_metrics import UNKNOWN
from quire.observe.tracing import CARRIED
from quire.server.api_keys import ApiKeys, KeyUse, Tenant
from quire.server.errors import ApiError
from quire.server.page.document import page_paths
from quire.server.state import ServerState

OPEN = page_paths() | frozenset(
    ("/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/metrics")
)
"""Paths that need no key: probes, scrapers and a browser that loads the page have none yet. They reveal nothing about
requests, and no key's name. Every other path needs a key, also an unknown one.
"""

TENANT = "quire.tenant"
KEY_USE = "quire.key_use"
NEW_ID = "quire.request_id"
SPAN_HEADERS = ("traceparent", "tracestate")
CLOSED_BY_CLIENT = 499  # no client reads it: for the log and the metrics

VALID_ID = re.compile(r"[\x21-\x7e]{1,256}")
"""A request id from a client: it goes into answers, logs and the engine."""


class RequestCountMiddleware:
    """Counts the HTTP requests in progress (/load), their durations, and the error answers."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Iterable[str]):
        self.app, self.state = app, state
        self.paths = frozenset(paths)
        self.prefixes = [
            (path.partition("{")[0], path.replace(":path", "")) for path in paths if "{" in path
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        began, status, sent = time.perf_counter(), CLOSED_BY_CLIENT, 0

        async def send_counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
            if message["type"] == "http.response.start" and message["status"] >= 400 and not probe:
                self.state.metrics.failed(message["status"])
            try:
                await send(message)
            except RuntimeError as error:
                if "handler is closed" not in str(error):
                    raise  # uvloop's message for a disconnected client

        probe = get_route_path(scope) in OPEN  # 503 is a normal answer of these

        metrics = self.state.metrics.http
        self.state.http_requests += 1
        if metrics is not None:
            metrics.under_way.set(self.state.http_requests)
        try:
            await self.app(scope, receive, send_counted)
        finally:
            self.state.http_requests -= 1
            seconds = time.perf_counter() - began
            if metrics is not None:
                metrics.under_way.set(self.state.http_requests)
                received = content_length(scope)
                metrics.answered(
                    self._route(scope), scope["method"], status, seconds, received, sent
                )

    def _route(self, scope: Scope) -> str:
        """The pattern of the route, so that clients cannot create metric labels."""
        path: str = get_route_path(scope)
        if path in self.paths:
            return path
        for prefix, route in self.prefixes:
            if path.startswith(prefix):
                return route
        return UNKNOWN


def content_length(scope: Scope) -> int:
    text = Headers(scope=scope).get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


class TraceMiddleware:
    """Keeps the caller's trace context, for the spans of its requests."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            CARRIED.set({name: headers[name] for name in SPAN_HEADERS if name in headers})
        await self.app(scope, receive, send)


class RequestIdMiddleware:
    """Answers with X-Request-Id: the client's own, or a new one, which is the generation's id if the body has none."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given_id = Headers(scope=scope).get("x-request-id")
        if given_id is None:
            name = scope[NEW_ID] = secrets.token_hex(16)
        else:
            # a bad one is refused later; never echoed
            name = given_id if VALID_ID.fullmatch(given_id) else ""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and name:
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        await self.app(scope, receive, named)


class ApiKeyMiddleware:
    """Answers 401 to a request without a valid key, unless its path is in OPEN.

    Compares the path exactly as the router does, so that no other spelling passes. Puts the key's tenant into the scope
    as `TENANT`, and the use of its limits as `KEY_USE`, which ends with the request.
    """

    def __init__(
        self, app: ASGIApp, tenants: ApiKeys, refusal: Callable[[Scope, ApiError], Response]
    ):
        self.app, self.tenants, self.refusal = app, tenants, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope):
            if scope["type"] == "http" and (tenant := self._who(scope)) is not None:
                scope[TENANT] = tenant  # /metrics shows more to a request with a key
            await self.app(scope, receive, send)
        elif (tenant := self._who(scope)) is not None:
            scope[TENANT] = tenant
            use = scope[KEY_USE] = KeyUse(tenant)
            try:
                await self.app(scope, receive, self._telling(tenant, send))
            finally:
                use.end()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        else:
            error = ApiError(
                401,
                "Unauthorized: this server needs an API key, as `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await self.refusal(scope, error)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # A browser sends no key with OPTIONS, and no route handles it.
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            return True
        return get_route_path(scope) in OPEN

    def _who(self, scope: Scope) -> Tenant | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # clients of /v1/messages send it here
        return self.tenants.find(key.strip().encode("latin-1"))  # the raw bytes

    def _telling(self, tenant: Tenant, send: Send) -> Send:
        if not tenant.headers():
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in tenant.headers().items():
                    headers[name] = value
            await send(message)

        return send_with_limits
