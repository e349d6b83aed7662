"""The way of a request through every route that uses the engine.

    read the body -> find model and adapter -> build (check, tokenize) -> Answer -> stream it, or run it and answer

Knows the order, threads, streams and disconnects. Does not know any body or answer: a route gives the Struct of its
body and a function that builds its `Answer`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.async_engine import AsyncEngine
from quire.server.adapters import model_of
from quire.server.api_keys import Tenant
from quire.server.errors import invalid
from quire.server.media import options_of, read_media
from quire.server.middleware import NEW_ID, TENANT, VALID_ID
from quire.server.request_body import SHORT_BODY, SIZE, read
from quire.server.sse import EventStream, until_disconnect
from quire.server.state import ServerState, state_of
from quire.server.tokenizer_pool import run_alone

Endpoint = Callable[[Request], Awaitable[Response | EventStream]]
Body = TypeVar("Body", bound=msgspec.Struct)


class NamedBody(Protocol):
    """A body with an id and a priority."""

    request_id: str | None
    priority: int


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a route knows of a request besides its body."""

    request: Request
    state: ServerState
    engine: AsyncEngine
    model: str
    """The model's name in the answer."""
    adapter: str | None
    """The LoRA adapter that the request names as its model."""

    @property
    def tenant(self) -> Tenant | None:
        tenant: Tenant | None = self.request.scope.get(TENANT)
        return tenant

    def engine_options(self, body: NamedBody) -> dict[str, Any]:
        """Keywords of `AsyncEngine.open`.

        The header X-Vllm-Priority takes precedence over the body's priority; lower runs first. The header
        X-data-parallel-rank names the engine that must serve the request; without it, or with another text: any.
        """
        priority = self.request.headers.get("x-vllm-priority", "")
        rank = self.request.headers.get("x-data-parallel-rank", "")
        return {
            "priority": int(priority) if re.fullmatch(r"-?\d{1,9}", priority) else body.priority,
            "tenant": "" if self.tenant is None else self.tenant.id,
            "adapter": self.adapter,
            "data_parallel_rank": int(rank) if re.fullmatch(r"\d{1,9}", rank) else None,
        }

    def new_id(self, kind: str, body: NamedBody) -> str:
        """`{kind}X`: X is the header X-Request-Id, else the body's request_id, else the id of the answer's header, else
        random.
        """
        header = self.request.headers.get("x-request-id")
        if header is not None and not VALID_ID.fullmatch(header):
            raise invalid("the header X-Request-Id must have 1 to 256 visible ASCII characters")
        new = self.request.scope.get(NEW_ID)
        return f"{kind}{header or body.request_id or new or secrets.token_hex(16)}"


class OutputSource(Protocol):
    """What a route runs in the engine; an `EventSource` too if the outputs can be streamed."""

    async def whole(self) -> Any:
        """All outputs. It is cancelled if the client disconnects."""


class Answer(Protocol):
    """A request that is ready to run; the `EventEncoder` of its outputs too if they can be streamed."""

    @property
    def source(self) -> OutputSource: ...

    async def response(self, outputs: Any) -> Response:
        """The answer in one piece."""


Builder = Callable[[RequestContext, Body], Coroutine[Any, Any, Answer | Response]]


def route(
    kind: type[Body], *, pooling: bool | None = False, media: str = ""
) -> Callable[[Builder[Body]], Endpoint]:
    """Makes an endpoint of a function that builds the Answer to a body, or the response if nothing must run.

    The function runs in an event loop of a thread if the body is long, so it must not wait for anything of the server's loop.

    Args:
        kind: the body.
        pooling: whether the route needs a pooling model or one that generates; None: it takes both.
        media: the fields whose messages may have pictures, videos and sound, which are read before; empty: none.
    """

    def endpoint_of(build: Builder[Body]) -> Endpoint:
        @wraps(build)
        async def endpoint(request: Request) -> Response | EventStream:
            state = state_of(request)
            engine = state.serving()
            if pooling is not None:
                front = engine.front
                (front.need_pooling if pooling else front.need_generation)(request.url.path)
            body: Any = await read(state, request, kind)
            model, adapter = await model_of(state, request, body.model)
            context = RequestContext(request, state, engine, model, adapter)
            if media:
                scope = f"{context.tenant and context.tenant.id}:{getattr(body, 'cache_salt', None) or ''}"
                options = options_of(body, state.config.media)
                for name in media.split():
                    given = getattr(body, name)
                    await read_media(given, name, engine, scope, request.receive, options)
            answer: Any
            if (size := request.scope[SIZE]) <= SHORT_BODY:
                answer = await build(context, body)
            else:
                answer = await state.texts.run_sized(size, run_alone, build, context, body)
            if isinstance(answer, Response):
                return answer
            if getattr(body, "stream", False):
                keep_alive = state.config.server.sse_keep_alive_interval
                stream = EventStream(answer.source, answer, request.receive, keep_alive)
                await stream.prepare()
                return stream
            outputs = await until_disconnect(request.receive, answer.source.whole())
            response: Response = await answer.response(outputs)
            return response

        return endpoint

    return endpoint_of
