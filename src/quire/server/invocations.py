"""POST /invocations: one path for all requests, as SageMaker calls it.

Knows which body is for which endpoint. Does not know the endpoints.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import invalid
from quire.server.openai.chat import chat
from quire.server.openai.completions import completions
from quire.server.request_body import read, read_raw
from quire.server.sse import EventStream


class InvocationBody(Struct):
    """The fields that select the endpoint, which checks their values."""

    messages: Any = None
    prompt: Any = None


async def invocations(request: Request) -> Response | EventStream:
    """A body with `messages` is a chat, one with `prompt` a completion."""
    request._body = await read_raw(request)  # the endpoint reads it from here
    asked = await read(request, InvocationBody)
    if asked.messages is not None:
        return await chat(request)
    if asked.prompt is not None:
        return await completions(request)
    raise invalid("`/invocations` needs `messages` (chat) or `prompt` (completion)", "messages")
