"""What goes between a ProcessExecutor and its worker's process: msgpack, one message a frame.

Knows the messages, and how an exception and a function cross. Does not know pipes. Every message down but `StartWorker`
has exactly one answer, and answers come in the order of the questions, so nothing needs a number. No torch here.

    down   Start      up   Started, or Ended
           StepPlan        StepResult, or Raised
           Ask             Answer, or Raised
                           Ended: at any time, and nothing after it
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

import msgspec
from msgspec import Struct

from quire import errors
from quire.config.serialize import marked
from quire.config.serialize import revived as revived_name
from quire.errors import QuireError, Unsupported
from quire.protocol.plan import StepPlan, StepResult


class StartWorker(Struct, array_like=True, tag="start"):
    """Call `target` ("module:function") with `payload` to make the worker.

    `path` is the parent's sys.path without the working directory (`config/serialize.py`).
    """

    target: str
    payload: bytes
    path: list[str]


class CallWorker(Struct, array_like=True, tag="ask"):
    """Call a named function of the worker."""

    name: str
    args: list[Any]


class WorkerStarted(Struct, array_like=True, tag="started"):
    """The worker is made."""


class CallResult(Struct, array_like=True, tag="answer"):
    value: Any = None


class CallFailed(Struct, array_like=True, tag="call_failed"):
    """This question failed; the worker goes on."""

    kind: str
    text: str
    detail: str  # the traceback


class WorkerEnded(Struct, array_like=True, tag="worker_ended"):
    """The worker could not be made, or cannot go on."""

    kind: str
    text: str
    detail: str


Down = StartWorker | StepPlan | CallWorker
Up = WorkerStarted | StepResult | CallResult | CallFailed | WorkerEnded


def _by_its_name(value: Any) -> Any:
    if callable(value):
        return marked(value)
    raise TypeError(f"a {type(value).__name__} cannot go to another process")


_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_encoder = msgspec.msgpack.Encoder(enc_hook=_by_its_name)


def encode(message: Down | Up) -> bytes:
    """Raises TypeError, ConfigError: something in it cannot go to another process."""
    return _encoder.encode(message)


def decode_down(data: bytes) -> Down:
    return _down.decode(data)


def decode_up(data: bytes) -> Up:
    return _up.decode(data)


def revive_callables(value: Any) -> Any:
    """Functions and classes again, wherever their names stand.

    Only an extension type of msgpack marks a name, and JSON has none: no argument that came by HTTP names what is
    imported here.
    """
    if isinstance(value, dict):
        return {key: revive_callables(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revive_callables(item) for item in value]
    return revived_name(value)


def call_failed(error: BaseException) -> CallFailed:
    return CallFailed(
        type(error).__name__, _text(error), "".join(traceback.format_exception(error))
    )


def worker_ended(error: BaseException) -> WorkerEnded:
    told = call_failed(error)
    return WorkerEnded(told.kind, told.text, told.detail)


def _text(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def exception(told: CallFailed | WorkerEnded) -> Exception:
    """The exception that was told of: of its own kind if that is one of ours or Python's, with the worker's
    traceback as a note; else a QuireError that names it."""
    kind = getattr(errors, told.kind, None) or getattr(builtins, told.kind, None)
    simple = isinstance(kind, type) and issubclass(kind, Exception)
    if simple and not issubclass(kind, (Unsupported, UnicodeError, ExceptionGroup)):  # type: ignore[arg-type]
        error: Exception = kind(told.text)  # type: ignore[misc]
    else:
        error = QuireError(f"{told.kind}: {told.text}")
    if not isinstance(error, errors.ConfigError):  # those speak to the user and say it all
        error.add_note(f"In the worker's process:\n{told.detail}")
    return error
