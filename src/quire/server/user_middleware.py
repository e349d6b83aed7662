"""`--middleware`: the operator's ASGI layers, by import path.

Knows how to import them. Does not know what they do: they see each request before its key is checked, and each answer
after everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.serialize import by_name
from quire.errors import ConfigError
from quire.server.errors import ENDS, error_response


class UserMiddlewareBoundary:
    """Turns an exception of the operator's layers into an answer and a log line."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_counted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        except ENDS:
            raise
        except BaseException as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


def own_layers(paths: Sequence[str]) -> list[Middleware]:
    """The layers; the first is the outermost.

    Raises:
        ConfigError: the path cannot be imported, or names neither kind of layer.
    """
    layers = [_layer(path, by_name(path, "middleware")) for path in paths]
    return [Middleware(UserMiddlewareBoundary), *layers] if layers else []


def _layer(path: str, found: Any) -> Middleware:
    if inspect.isclass(found):
        layer: Any = found
        return Middleware(layer)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(
        f"middleware={path!r} is neither a class (ASGI: __init__(self, app), __call__(self, scope, receive, send))"
        " nor an async function(request, call_next)"
    )
