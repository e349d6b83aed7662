"""POST /invocations: one path for everything, as SageMaker calls it.

Knows which body is meant for which endpoint. Does not know the endpoints.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.bodies import read_object
from quire.server.chat import chat
from quire.server.completions import completions
from quire.server.errors import invalid
from quire.server.sse import EventStream


async def invocations(request: Request) -> Response | EventStream:
    """A body with `messages` is a chat, one with `prompt` a completion."""
    body = await read_object(request)
    # The endpoint reads the body again, from here.
    request._body = msgspec.json.encode(body)
    if "messages" in body:
        return await chat(request)
    if "prompt" in body:
        return await completions(request)
    raise invalid("`/invocations` needs `messages` (a chat) or `prompt` (a completion)", "messages")
