"""The error body, and the table from exceptions to statuses.

Knows OpenAI's envelope and Quire's exceptions. Does not know endpoints. A client never gets a traceback, a memory
address or a path of this machine.
"""

from __future__ import annotations

import re
from asyncio import CancelledError
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from quire.errors import (
    Conflict,
    EngineDeadError,
    EngineDelayed,
    InternalError,
    NotFetched,
    QueueFull,
    QuireError,
    StartupError,
    Unsupported,
    ValidationError,
)
from quire.logging import get_logger

log = get_logger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "Method Not Allowed",
    408: "RequestTimeout",
    409: "Conflict",
    413: "RequestTooLarge",
    415: "BadRequestError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

MESSAGE_LIMIT = 2000  # characters: quotes of a request stay readable
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?<![\w:/.])/(?!v[12]/)(?:[\w.@+-]+/)+[\w.@+-]*[\w@+-]")


class ApiError(QuireError):
    """An error answer: status, message, the parameter at fault, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.kind = kind or TYPES.get(status, HTTPStatus(status).phrase)
        self.headers = headers or {}


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


ENDS = (CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Not failures of a request: they propagate. A panic in Rust code (a tokenizer) is a BaseException too, and fails only
its request.
"""


def as_api_error(error: BaseException) -> ApiError:
    """The table. An exception that is not in it is a bug: the log has all of it, the client gets one sentence."""
    match error:
        case ApiError():
            return error
        case NotFetched():
            return ApiError(422, str(error), param=error.parameter)
        case ValidationError():
            return ApiError(400, str(error), param=error.parameter)
        case Unsupported():  # not 501, after which SDKs send the request again
            return ApiError(400, str(error))
        case Conflict():
            return ApiError(409, str(error))
        case QueueFull():
            return unavailable(str(error), 1)
        case EngineDelayed():
            return unavailable(str(error), 30)
        case EngineDeadError():
            return ApiError(500, f"the engine has stopped; {logged(error)}")
        case StartupError():
            return unavailable(f"the engine could not be started; {logged(error)}")
        case TimeoutError():
            return ApiError(408, str(error) or "the request exceeded its time limit")
        case InternalError():
            return ApiError(500, f"the engine failed on this request; {logged(error)}")
        case QuireError():
            return ApiError(500, str(error))
        case RecursionError():
            return ApiError(400, "the body is nested too deeply")
        case ValueError() | TypeError() | OverflowError():
            # A library raised it on a value of the request (a template, a tokenizer): the client can change the value.
            return ApiError(
                400, f"the request contains a value that cannot be used; {logged(error)}"
            )
        case _:
            log.error("a request failed", exc_info=error)
            return ApiError(500, "the server failed on this request; see the server's log")


def logged(error: BaseException) -> str:
    """Log an error and say where to find it: its message may contain file names, addresses and others' requests."""
    incident = sha256(f"{type(error).__name__}: {error}".encode(errors="replace")).hexdigest()[:8]
    log.warning("failure %s: %s: %s", incident, type(error).__name__, error)
    return f"see the server's log under {incident}"


def clean(message: str) -> str:
    """Remove addresses and paths of this machine, and shorten."""
    message = message[: 4 * MESSAGE_LIMIT]  # it may quote a value of any length
    message = _PATH.sub("[path]", _ADDRESS.sub("", message))
    return message if len(message) <= MESSAGE_LIMIT else message[:MESSAGE_LIMIT] + " ..."


def envelope(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": clean(error.message),
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: BaseException) -> Response:
    known = as_api_error(error)
    return Response(
        msgspec.json.encode(envelope(known)),
        status_code=known.status,
        media_type="application/json",
        headers=known.headers,
    )
