"""The HTTP application: routes as a list, what stands before them, and how errors are answered.

    connection -> Counted -> --middleware -> CORS -> RequestIds -> Guard -> router -> endpoint

Knows every endpoint by name. Does not know how the process is started (`launch.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import EngineDeadError
from quire.server import admin, docs, health, messages, models, responses, tokens
from quire.server.chat import chat
from quire.server.completions import completions
from quire.server.errors import ApiError, error_response
from quire.server.invocations import invocations
from quire.server.layers import own_layers
from quire.server.middleware import CLOSED_BY_CLIENT, Counted, Guard, RequestIds, Traced
from quire.server.page import routes as page
from quire.server.sse import EventStream
from quire.server.state import Phase, ServerState
from quire.server.tenants import Tenants

Endpoint = Callable[[Request], Awaitable[Response | EventStream]]

ROUTES: list[tuple[str, str, Endpoint]] = [
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses.responses),
    ("GET", "/v1/responses/{name}", responses.stored),
    ("POST", "/v1/responses/{name}/cancel", responses.stored),
    ("POST", "/v1/messages", messages.messages),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{name:path}", models.model),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/health", health.health),
    ("GET", "/health/live", health.live),
    ("GET", "/health/ready", health.ready),
    ("GET", "/health/startup", health.startup),
    ("GET POST", "/ping", health.health),
    ("GET", "/version", health.version),
    ("GET", "/load", health.load),
    ("GET", "/metrics", health.metrics),
    ("POST", "/invocations", invocations),
]

UI_ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/", page.page),
    ("GET", "/ui/state", page.ui_state),
    ("GET", "/ui/words", page.ui_words),
]

DEV_ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/server_info", admin.server_info),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ("POST", "/collective_rpc", admin.collective_rpc),
    ("POST", "/abort_requests", admin.abort_requests),
    ("POST", "/sleep", admin.sleep),
    ("POST", "/wake_up", admin.wake_up),
    ("GET", "/is_sleeping", admin.is_sleeping),
    ("POST", "/pause", admin.pause),
    ("POST", "/resume", admin.resume),
    ("GET", "/is_paused", admin.is_paused),
]
"""They can stop or change what others asked for: only with QUIRE_SERVER_DEV_MODE=1."""


def guarded(endpoint: Endpoint) -> Endpoint:
    """Whatever an endpoint raises becomes an answer: an error ends one request and nothing else."""

    async def answered(request: Request) -> Response | EventStream:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=CLOSED_BY_CLIENT)
        except EngineDeadError as error:
            request.app.state.quire.phase = Phase.DEAD
            return error_response(error)
        except Exception as error:
            return error_response(error)

    answered.__name__ = endpoint.__name__
    return answered


async def http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: no such path, no such method."""
    if not isinstance(error, HTTPException):
        return error_response(error)
    phrase, headers = HTTPStatus(error.status_code).phrase, dict(error.headers or {})
    takes = next((value for name, value in headers.items() if name.lower() == "allow"), None)
    what = phrase if takes is None else f"{phrase}: this path takes {takes}"
    return error_response(ApiError(error.status_code, what, kind=phrase, headers=headers))


def build_app(state: ServerState) -> Starlette:
    """The application for one server's state."""
    server = state.config.server
    if state.tenants is None:
        state.tenants = Tenants(server)
    tenants = state.tenants
    rows = ROUTES + (DEV_ROUTES if state.dev_mode else [])
    if not server.disable_ui:
        rows = rows + UI_ROUTES
    if not server.disable_fastapi_docs:
        rows = rows + docs.routes(rows, bool(tenants))
    layers = [Middleware(Counted, state=state, paths=[path for _, path, _ in rows])]
    layers += own_layers(server.middleware)
    if server.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server.allowed_origins,
                allow_methods=server.allowed_methods,
                allow_headers=server.allowed_headers,
                allow_credentials=server.allow_credentials,
            )
        )
    if state.tracer is not None:
        layers.append(Middleware(Traced))
    if server.enable_request_id_headers:
        layers.append(Middleware(RequestIds))
    if tenants:
        layers.append(Middleware(Guard, tenants=tenants))
    app = Starlette(
        routes=[Route(path, guarded(call), methods=kinds.split()) for kinds, path, call in rows],
        middleware=layers,
        exception_handlers={HTTPException: http_error},
    )
    app.router.redirect_slashes = False
    app.state.quire = state
    return app
