"""Reads a request's body within a limit, and decodes it into a Struct.

The event loop decodes short bodies, a thread long ones. Knows bytes, JSON and Structs. Does not know any field's
meaning.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Set
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.logging import get_logger
from quire.server.errors import ApiError, invalid
from quire.server.json_body_parser import not_an_object, not_json, not_valid, read_long
from quire.server.state import ServerState

log = get_logger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

SIZE = "quire.body_size"  # in the scope of a request whose body was read
RAW = "quire.body"  # the body, if it is read again
SHORT_BODY = 64 << 10  # bytes: any work on so few does not delay other requests
MOST_UNKNOWN = 8  # unknown fields that are compared with the known ones
MOST_NAME = 64  # characters of such a field; the longest known name has half
MOST_LOGGED = 100  # unknown fields that are logged by name, so that clients cannot fill the log
_logged: set[str] = set()


BODY_BYTES_PER_S = 16 << 10
"""The lowest average rate of a body. The slowest mobile networks are faster; without it, a client that sends a byte now
and then would keep its connection forever.
"""


async def read_body(request: Request, limit: int, patience: float = 0) -> bytes:
    """The whole body. `patience`: seconds without a new part, and seconds in all beyond those that its bytes take at
    BODY_BYTES_PER_S; 0: any.

    Raises:
        ApiError: 413: longer than `limit` bytes, also without Content-Length; 408: it does not arrive in time.
        ClientDisconnect: the client is gone.
    """
    length = request.headers.get("content-length", "0")
    size = int(length) if length.isdigit() else 0
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
                    return part  # most bodies have one part
                body += part
                if more and patience:
                    clock.reschedule(min(now() + patience, last + len(body) / BODY_BYTES_PER_S))
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the body is incomplete: {len(body)} bytes arrived, and the server waits at most {patience:g} s"
            f" (--receive-timeout) plus 1 s for each {BODY_BYTES_PER_S} bytes",
            headers={"Connection": "close"},
        ) from error
    return bytes(body)


def too_long(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {limit} bytes (--max-body-bytes)",
        headers={"Connection": "close"},
    )


def read_short(raw: bytes, kind: type[Body], warn: bool = True) -> Body:
    """A short body as a Struct. Ignores nulls, and accepts numbers as strings, as many clients send them.

    Raises:
        ApiError: 400 that names the field.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from error
    if not isinstance(body, dict):
        raise not_an_object()
    body = {key: value for key, value in body.items() if value is not None}
    known = set(kind.__struct_encode_fields__)  # structs.fields evaluates annotations: 1 ms
    if warn and (unknown := body.keys() - known):
        warn_of(unknown, known)
    try:
        return msgspec.convert(body, kind, strict=False)
    except msgspec.ValidationError as error:
        raise not_valid(str(error)) from error


def warn_of(unknown: Set[str], known: Set[str]) -> None:
    """Log some of the unknown fields, which are ignored: a misspelt name would otherwise go unnoticed.

    Not all, since comparing names is slow and a body may have thousands of unknown fields.
    """
    looked_at = [name for name in islice(unknown, MOST_UNKNOWN) if len(name) < MOST_NAME]
    for name in looked_at:
        if close := difflib.get_close_matches(name, known, 1, 0.85):
            log.warning_every(close[0], 60, "ignored field %r: did you mean %r?", name, close[0])
        elif name not in _logged and len(_logged) < MOST_LOGGED:
            _logged.add(name)
            log.info("ignored field %r of a request: it is unknown", name)
    log.debug("ignored fields: %s (%d in all)", ", ".join(sorted(looked_at)), len(unknown))


async def read(
    state: ServerState, request: Request, kind: type[Body], *, is_last: bool = True
) -> Body:
    """The body of a request with Content-Type JSON as a Struct; a thread decodes a long one.

    `is_last`: it is not read again. Only then unknown fields of a short one are logged.

    Raises:
        ApiError: 400, 408 or 413.
        ClientDisconnect: the client is gone.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise invalid(
            "Unsupported Media Type: Only 'application/json' is allowed; send the header Content-Type: application/json"
            " (curl: -H 'Content-Type: application/json')"
        )
    raw: bytes | None = request.scope.pop(RAW, None)
    if raw is None:
        server = state.config.server
        raw = await read_body(request, server.max_body_bytes, server.receive_timeout)
    request.scope[SIZE] = len(raw)
    if not is_last:
        request.scope[RAW] = raw
    if len(raw) <= SHORT_BODY:
        return read_short(raw, kind, is_last)
    return await state.texts.run_sized(len(raw), read_long, raw, kind)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


__all__ = ["ClientDisconnect", "json_response", "read", "read_body"]
