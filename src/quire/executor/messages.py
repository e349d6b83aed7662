"""Messages between a RankProcess and its worker process: msgpack, one message a frame.

Knows the messages, and how exceptions and functions are encoded. Does not know pipes. Every message to the worker
except `StartWorker` has exactly one answer. Answers come in the order of the messages, so they need no number. No
torch here.

    down   StartWorker    up   WorkerProgress, any number; then WorkerStarted, or WorkerEnded
           StepPlan            StepResult, or CallFailed
           CallWorker          CallResult, or CallFailed
                               WorkerEnded: at any time, and nothing after it
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from quire import errors
from quire.config.serialize import marked
from quire.config.serialize import revived as revived_name
from quire.errors import InternalError, Unsupported
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.tensor_data import decode_tensor, encode_tensor


class StartWorker(Struct, array_like=True, tag="start"):
    """Call `target` ("module:function") with `payload` to create the worker.

    `path` is the parent's sys.path without the working directory (`config/serialize.py`). `reports`: the parent reads
    WorkerProgress. It does not read the progress of other ranks, so their pipes would fill up and block them.
    """

    target: str
    payload: bytes
    path: list[str]
    reports: bool


class CallWorker(Struct, array_like=True, tag="ask"):
    """Call a named function of the worker."""

    name: str
    args: list[Any]


class WorkerProgress(Struct, array_like=True, tag="progress"):
    """The worker is being created: what it does, and the share of the weights that is loaded."""

    stage: str
    share: float


class WorkerStarted(Struct, array_like=True, tag="started"):
    """The worker has been created."""


class CallResult(Struct, array_like=True, tag="answer"):
    value: Any = None


class CallFailed(Struct, array_like=True, tag="call_failed"):
    """A call or a step failed; the worker goes on."""

    kind: str
    text: str
    detail: str  # the traceback


class WorkerEnded(Struct, array_like=True, tag="worker_ended"):
    """The worker could not be created, or cannot go on."""

    kind: str
    text: str
    detail: str


Down = StartWorker | StepPlan | CallWorker | CallFailed
Answer = StepResult | CallResult | CallFailed
Up = WorkerProgress | WorkerStarted | Answer | WorkerEnded

Message = TypeVar("Message")


def _encode_callable(value: Any) -> Any:
    return marked(value) if callable(value) else encode_tensor(value)


_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up, dec_hook=decode_tensor)
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_callable)


def encode(message: Down | Up) -> bytes:
    """Raises TypeError, ConfigError: something in the message cannot be sent to another process."""
    return _encoder.encode(message)


def decode_down(data: bytes) -> Down:
    """The message; CallFailed: the answer to one that cannot be decoded."""
    return _decoded(_down, data)


def decode_up(data: bytes) -> Up:
    """The message; CallFailed: it is an answer that cannot be decoded."""
    return _decoded(_up, data)


def _decoded(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message | CallFailed:
    """msgpack encodes some values that it does not decode: a dataclass as a key of a dict, a deep list."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as why:
        return call_failed(TypeError(f"a value cannot be sent to another process: {why}"))


def revive_callables(value: Any) -> Any:
    """Import functions and classes again, wherever their names occur in `value`.

    Only a msgpack extension type marks such a name, and JSON has none. So no argument that came by HTTP can
    cause an import here.
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
    failure = call_failed(error)
    return WorkerEnded(failure.kind, failure.text, failure.detail)


def _text(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def exception(failure: CallFailed | WorkerEnded) -> Exception:
    """Rebuild the worker's exception: of its own type if that is Quire's or Python's, with the worker's traceback as a
    note; else an InternalError that names the type."""
    kind = getattr(errors, failure.kind, None) or getattr(builtins, failure.kind, None)
    simple = isinstance(kind, type) and issubclass(kind, Exception)
    if simple and not issubclass(kind, (Unsupported, UnicodeError, ExceptionGroup)):  # type: ignore[arg-type]
        error: Exception = kind(failure.text)  # type: ignore[misc]
    else:
        error = InternalError(f"{failure.kind}: {failure.text}")
    if not isinstance(error, errors.ConfigError):  # ConfigError messages are complete, for the user
        error.add_note(f"In the worker's process:\n{failure.detail}")
    return error
