"""Health, version, load and metrics.

Knows the server's state. Does not know requests' contents.

    /health, /ping   200 while it takes requests, drains or restarts its engine; 503 while it loads, waits to restart
                     an engine that died too often, or is dead
    /health/live     200 as long as the process runs: a restart would not help
    /health/startup  200 once the model is loaded
    /health/ready    200 while it takes new requests
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.observe.http_metrics import UNDER_WAY
from quire.observe.prometheus import CONTENT_TYPE
from quire.server.middleware import TENANT
from quire.server.request_body import json_response
from quire.server.state import ServerPhase, ServerState, state_of
from quire.version import __version__


def status(state: ServerState, good: bool) -> Response:
    """200 without a body; or 503 with the reason, and while the model loads with the share of the weights."""
    if good:
        return Response(status_code=200)
    body: dict[str, Any] = {"status": state.unavailable_reason()}
    if state.phase is ServerPhase.LOADING:
        startup = state.startup()
        body = {"status": "loading", "stage": startup.stage, "progress": round(startup.progress, 3)}
    return json_response(body, 503, {"Retry-After": "1"})


async def health(request: Request) -> Response:
    """200 if it takes requests, or will without help."""
    state = state_of(request)
    return status(state, state.healthy())


async def live(request: Request) -> Response:
    """200 as long as the process runs."""
    return Response(status_code=200)


async def startup(request: Request) -> Response:
    """200 once the model is loaded."""
    state = state_of(request)
    return status(state, state.phase is not ServerPhase.LOADING)


async def ready(request: Request) -> Response:
    """200 while it takes requests."""
    state = state_of(request)
    return status(state, state.healthy() and not state.unavailable_reason())


async def version(request: Request) -> Response:
    """This server's version."""
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    """Number of HTTP requests in progress, without this one."""
    state = state_of(request)
    count = state.metrics.value(UNDER_WAY) if state.fronts > 1 else state.http_requests
    return json_response({"server_load": max(0, int(count) - 1)})


async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus; those by key only for a request with a key."""
    state = state_of(request)
    named = not state.tenants or TENANT in request.scope
    return Response(state.metrics.render(named), headers={"Content-Type": CONTENT_TYPE})
