"""Layers as an operator may write them, for `--middleware`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOT_A_LAYER = 7


class Marked:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-order", "class")
            await send(message)

        await self.app(scope, receive, marked if scope["type"] == "http" else send)


async def also_marked(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    if request.headers.get("x-fail"):
        raise RuntimeError("the operator's own mistake, with /etc/secret in its text")
    response = await call_next(request)
    response.headers.append("x-order", "function")
    return response
