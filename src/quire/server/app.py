"""The HTTP application: the list of routes, the layers in front of them, and how errors are answered.

    connection -> RequestCountMiddleware -> KnownHosts -> --middleware -> CORS -> TraceMiddleware
               -> RequestIdMiddleware -> ApiKeyMiddleware -> router -> endpoint

Knows every endpoint by name. Does not know how the process is started (`process/launch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from msgspec import Struct
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute, get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config import unsupported
from quire.errors import EngineDeadError
from quire.server import adapters, dev_routes, health, openapi, profile_routes, token_generation
from quire.server.anthropic import messages
from quire.server.api_keys import ApiKeys
from quire.server.audio import routes as audio
from quire.server.audio.realtime import realtime
from quire.server.endpoint import Endpoint
from quire.server.errors import ENDS, ApiError, as_api_error, error_response, invalid
from quire.server.host_header import KnownHosts
from quire.server.llama_cpp import routes as llama_cpp
from quire.server.middleware import (
    CLOSED_BY_CLIENT,
    TENANT,
    ApiKeyMiddleware,
    RequestCountMiddleware,
    RequestIdMiddleware,
    TraceMiddleware,
)
from quire.server.ollama import routes as ollama
from quire.server.ollama.answers import error_response as ollama_error
from quire.server.openai import models, responses, stored_response_routes, tokenize
from quire.server.openai.chat import chat
from quire.server.openai.chat_batch import batch
from quire.server.openai.completions import completions
from quire.server.page import routes as page
from quire.server.pooling import score_routes, vector_routes
from quire.server.request_body import read
from quire.server.sse import EventStream
from quire.server.state import ServerPhase, ServerState, state_of
from quire.server.tokenizer_pool import CLIENT
from quire.server.user_middleware import own_layers


class InvocationBody(Struct):
    """The fields that select the endpoint, which checks their values."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    data_1: Any = None
    text_1: Any = None


async def pooling_invocation(
    request: Request, body: InvocationBody, task: str
) -> Response | EventStream:
    """`query` makes it a reranking, a pair of fields a score; else the model's task decides."""
    if body.query is not None:
        return await score_routes.rerank(request)
    if not (body.queries is body.data_1 is body.text_1 is None):
        return await score_routes.score(request)
    if body.input is None and body.messages is None:
        raise invalid("`/invocations` needs `input`, `messages`, `query` or `queries`: this model computes vectors or scores", "input")  # fmt: skip
    if task == "embed":
        return await vector_routes.embeddings(request)
    return await (vector_routes.classify if task == "classify" else vector_routes.pooling)(request)


async def invocations(request: Request) -> Response | EventStream:
    """One path for all requests, as SageMaker calls it. The fields of the body select the endpoint."""
    state = state_of(request)
    body = await read(state, request, InvocationBody, is_last=False)
    pooling = state.serving().front.pooling
    if pooling is not None:
        return await pooling_invocation(request, body, pooling.info.tasks[0])
    if body.messages is not None:
        return await chat(request)
    if body.prompt is not None:
        return await completions(request)
    raise invalid("`/invocations` needs `messages` (chat) or `prompt` (completion)", "messages")


async def missing_route(request: Request, message: str) -> Response:
    """Raises ApiError 404 that says why, so that the path does not look misspelt.

    vLLM has no such route either for a model without the feature. SDKs repeat a request after a 501.
    """
    raise ApiError(404, message)


def missing_routes(dev_mode: bool) -> list[tuple[str, str, Endpoint]]:
    """Routes of features that are not built yet, and of those that are off. Not in the OpenAPI document."""
    later = unsupported.ROUTES | (unsupported.DEV_ROUTES if dev_mode else {})
    reasons = {
        path: f"{what} is not supported yet: {remedy}" for path, (what, remedy) in later.items()
    }
    flags = dict(unsupported.OPTIONAL_ROUTES)
    if not dev_mode:
        flags |= {path: "QUIRE_SERVER_DEV_MODE=1" for _, path, _ in DEV_ROUTES}
    reasons |= {
        path: f"{path} is off: start the server with {flag}" for path, flag in flags.items()
    }
    return [
        ("GET POST DELETE", path, partial(missing_route, message=m)) for path, m in reasons.items()
    ]


ROUTES: list[tuple[str, str, Endpoint]] = [
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/chat/completions/batch", batch),
    ("POST", "/v1/completions", completions),
    ("POST", "/inference/v1/generate", token_generation.generate),
    ("POST", "/v1/responses", responses.responses),
    ("GET", "/v1/responses/{name}", stored_response_routes.stored_response),
    ("DELETE", "/v1/responses/{name}", stored_response_routes.delete),
    ("POST", "/v1/responses/{name}/cancel", stored_response_routes.cancel),
    ("POST", "/v1/messages", messages.messages),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/embeddings", vector_routes.embeddings),
    ("POST", "/v1/embed", vector_routes.cohere_embed),
    ("POST", "/v2/embed", vector_routes.cohere_embed),
    ("POST", "/pooling", vector_routes.pooling),
    ("POST", "/v1/audio/transcriptions", audio.transcriptions),
    ("POST", "/v1/audio/translations", audio.translations),
    ("GET", "/v1/realtime", audio.realtime_needs_a_socket),
    ("POST", "/classify", vector_routes.classify),
    ("POST", "/score", score_routes.score),
    ("POST", "/v1/score", score_routes.score),
    ("POST", "/rerank", score_routes.rerank),
    ("POST", "/v1/rerank", score_routes.rerank),
    ("POST", "/v2/rerank", score_routes.rerank),
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{name:path}", models.model),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/health", health.health),
    ("GET", "/health/live", health.live),
    ("GET", "/health/ready", health.ready),
    ("GET", "/health/startup", health.startup),
    ("GET POST", "/ping", health.health),
    ("GET", "/version", health.version),
    ("GET", "/load", health.load),
    ("GET", "/metrics", health.metrics),
    ("POST", "/invocations", invocations),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.running),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/version", ollama.version),
    ("POST", "/infill", llama_cpp.infill),
    ("GET", "/props", llama_cpp.props),
    ("GET", "/slots", llama_cpp.slots),
]

UI_ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/", page.page),
    ("GET", "/ui/page/{name}", page.page),
    ("GET", "/ui/defaults", page.ui_defaults),
    ("GET", "/ui/state", page.ui_state),
    ("GET", "/ui/words", page.ui_words),
]

PROFILE_ROUTES: list[tuple[str, str, Endpoint]] = [
    ("POST", "/start_profile", profile_routes.start_profile),
    ("POST", "/stop_profile", profile_routes.stop_profile),
]

DEV_ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/server_info", dev_routes.server_info),
    ("POST", "/reset_prefix_cache", dev_routes.reset_prefix_cache),
    ("POST", "/reset_mm_cache", dev_routes.reset_mm_cache),
    ("POST", "/reset_encoder_cache", dev_routes.reset_encoder_cache),
    ("POST", "/collective_rpc", dev_routes.collective_rpc),
    ("POST", "/abort_requests", dev_routes.abort_requests),
    ("POST", "/sleep", dev_routes.sleep),
    ("POST", "/release_kv_cache_memory", dev_routes.release_kv_cache_memory),
    ("POST", "/wake_up", dev_routes.wake_up),
    ("GET", "/is_sleeping", dev_routes.is_sleeping),
    ("POST", "/pause", dev_routes.pause),
    ("POST", "/resume", dev_routes.resume),
    ("GET", "/is_paused", dev_routes.is_paused),
    ("GET", "/get_world_size", dev_routes.get_world_size),
]
"""They can stop or change other clients' requests: only with QUIRE_SERVER_DEV_MODE=1."""


class ErrorBoundary:
    """Turns an endpoint's exceptions into answers: an error ends one request and nothing else."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        CLIENT.set(client_of(scope))
        answer: Response | EventStream
        try:
            answer = await self.endpoint(request)
        except ClientDisconnect:
            answer = Response(status_code=CLOSED_BY_CLIENT)
        except ENDS:
            raise
        except BaseException as error:
            if isinstance(error, EngineDeadError):
                state_of(request).phase = ServerPhase.DEAD
            answer = refusal(scope, as_api_error(error))
        await answer(scope, receive, send)


def client_of(scope: Scope) -> str:
    """The client that gets a fair share of the threads: a key, or an address if no key is needed."""
    if (tenant := scope.get(TENANT)) is not None:
        return f"key {tenant.name} {id(tenant)}"
    address = scope.get("client")
    return "" if address is None else str(address[0])


class QuireApp:
    """Routes, inside the layers of middleware.

    Starlette's own application puts three more functions around each message that is sent, and a stream sends one
    message a token. `ErrorBoundary`, this class and uvicorn do the work of these functions.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        layers: Sequence[Middleware],
        root_path: str | None = None,
    ):
        self.state, self.router = State(), Router(routes, redirect_slashes=False)
        self.prefix = (root_path or "").rstrip("/")
        app: ASGIApp = self._routed
        for layer, args, keywords in reversed(layers):
            app = layer(app, *args, **keywords)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if self.prefix:
            self._remove_prefix(scope)
        await self._app(scope, receive, send)

    def _remove_prefix(self, scope: Scope) -> None:
        """Serve a path under `--root-path` too, if the proxy has not removed it. Before the layers, which compare paths."""
        path = get_route_path(scope)
        routes = self.router.routes
        if path.startswith(f"{self.prefix}/") and not any(
            isinstance(route, Route) and route.path_regex.match(path) for route in routes
        ):
            scope["path"] = scope.get("root_path", "") + path[len(self.prefix) :]

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            await refusal(scope, http_error(error, scope))(scope, receive, send)


def refusal(scope: Scope, error: ApiError) -> Response:
    """The answer to a request that is refused or failed, in the protocol of its path."""
    path = get_route_path(scope)
    if path.startswith("/v1/messages"):
        return messages.error_response(error)
    if path.startswith("/api/"):
        return ollama_error(error)
    return error_response(error)


def http_error(error: HTTPException, scope: Scope) -> ApiError:
    """The router's own errors: unknown path, wrong method, and a browser's question whether another site may ask."""
    phrase, headers = HTTPStatus(error.status_code).phrase, dict(error.headers or {})
    takes = next((value for name, value in headers.items() if name.lower() == "allow"), None)
    what = phrase if takes is None else f"{phrase}: this path takes {takes}"
    if takes is not None and scope["method"] == "OPTIONS":
        what += "; for requests from scripts of another site, start the server with --allowed-origins ORIGIN"
    return ApiError(error.status_code, what, kind=phrase, headers=headers)


def metrics_app(state: ServerState) -> QuireApp:
    """/metrics alone, for a program that serves no other requests."""
    app = QuireApp([Route("/metrics", ErrorBoundary(health.metrics), methods=["GET"])], [])
    app.state.quire = state
    return app


def build_app(state: ServerState) -> QuireApp:
    """The application for one server's state."""
    server = state.config.server
    if state.tenants is None:
        state.tenants = ApiKeys(server)
    tenants = state.tenants
    rows = ROUTES + (DEV_ROUTES if state.dev_mode else [])
    if adapters.runtime_updates():
        rows = rows + adapters.ROUTES
    if server.enable_tokenizer_info_endpoint:
        rows = [*rows, ("GET", "/tokenizer_info", tokenize.tokenizer_info)]
    if state.config.observe.profiler_config.get("profiler"):
        rows = rows + PROFILE_ROUTES
    if not server.disable_ui:
        rows = rows + UI_ROUTES
    if not server.disable_fastapi_docs:
        rows = rows + openapi.routes(rows, bool(tenants), server.root_path or "")
    rows = rows + missing_routes(state.dev_mode)
    layers = [Middleware(RequestCountMiddleware, state=state, paths=[path for _, path, _ in rows])]
    if state.hosts is not None:
        layers.append(Middleware(KnownHosts, hosts=state.hosts, refusal=refusal))
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
        layers.append(Middleware(TraceMiddleware))
    if server.enable_request_id_headers:
        layers.append(Middleware(RequestIdMiddleware))
    if tenants:
        layers.append(Middleware(ApiKeyMiddleware, tenants=tenants, refusal=refusal))
    live: list[BaseRoute] = [WebSocketRoute("/v1/realtime", realtime)]
    routes = live + [
        Route(path, ErrorBoundary(call), methods=kinds.split()) for kinds, path, call in rows
    ]
    app = QuireApp(routes, layers, server.root_path)
    app.state.quire = state
    return app
