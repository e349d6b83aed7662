"""A request's body: read within a limit, parsed, and turned into a Struct.

Knows bytes, JSON and Structs. Does not know what any field means.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.logging import get_logger
from quire.server.errors import ApiError, invalid
from quire.server.state import ServerState

log = get_logger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<where>[^`]*)`$", re.DOTALL)


BODY_BYTES_PER_S = 16 << 10
"""A body that comes more slowly, on average, is given up: the slowest mobile networks carry more, and a client that
sends a byte now and then would hold its connection for ever."""


async def read_body(request: Request, limit: int, patience: float = 0) -> bytes:
    """The whole body. `patience`: seconds that may pass without a part of it, and beside the time that its bytes
    have by BODY_BYTES_PER_S; 0: any.

    Raises:
        ApiError: 413 when it is longer than `limit` bytes, however it is sent; 408 when it does not come.
        ClientDisconnect: the client is gone.
    """
    told = request.headers.get("content-length", "0")
    size = int(told) if told.isdigit() else 0
    if size > limit:
        raise too_long(limit)
    body, more, now = bytearray(), True, asyncio.get_running_loop().time
    last = now() + patience
    try:
        async with asyncio.timeout(patience or None) as clock:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) + len(part) > limit:
                    raise too_long(limit)
                if not (more or body):
                    return part  # most bodies come in one part
                body += part
                if more and patience:
                    clock.reschedule(min(now() + patience, last + len(body) / BODY_BYTES_PER_S))
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the body did not come: {len(body)} bytes of it are here, and the server waits for at most {patience:g} s"
            f" (--receive-timeout) and 1 s more for each {BODY_BYTES_PER_S} bytes",
            headers={"Connection": "close"},
        ) from error
    return bytes(body)


def too_long(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes (--max-body-bytes)",
        headers={"Connection": "close"},
    )


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object, without the keys whose value is null: null means "not given".

    Raises:
        ApiError: 400 or 413.
        ClientDisconnect: nobody is there any more.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    state: ServerState = request.app.state.quire
    raw = getattr(request, "_body", None)  # /invocations has read it
    if raw is None:
        server = state.config.server
        raw = await read_body(request, server.max_body_bytes, server.receive_timeout)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", kind="Bad Request") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", kind="Bad Request")
    return {key: value for key, value in body.items() if value is not None}


def convert(body: dict[str, Any], kind: type[T]) -> T:
    """A body as a Struct. Numbers may come as text, as many clients send them.

    Unknown keys are ignored, and logged: a slip of the pen would otherwise go unseen.

    Raises:
        ApiError: 400 that names the field.
    """
    known = set(kind.__struct_encode_fields__)  # structs.fields evaluates annotations anew: 1 ms
    if unknown := body.keys() - known:
        near = {
            key: close[0]
            for key in unknown
            if (close := difflib.get_close_matches(key, known, 1, 0.85))
        }
        for key, meant in near.items():
            log.warning_every(f"field {key}", 60, "ignored field %r: was %r meant?", key, meant)
        log.debug("ignored fields: %s", ", ".join(sorted(unknown)))
    try:
        return msgspec.convert(body, kind, strict=False)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        what, where = (found["what"], found["where"]) if found else (str(error), "")
        if missing := re.search(r"missing required field `(\w+)`", what):
            where = f"{where}.{missing[1]}".lstrip(".")
        raise ApiError(
            400,
            f"1 validation error: {where or 'body'}: {what}",
            param=where or None,
            kind="Bad Request",
        ) from error


async def read(request: Request, kind: type[T]) -> T:
    return convert(await read_object(request), kind)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


__all__ = ["ClientDisconnect", "convert", "json_response", "read", "read_body", "read_object"]
