"""Common to completions and chat: ids, the head of a frame, usage, fingerprint.

Knows OpenAI's outer shapes. Does not know choices.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from quire.server.errors import invalid
from quire.server.middleware import NEW_ID, VALID_ID
from quire.server.output_delta import OutputDelta
from quire.server.schemas import Sampling
from quire.server.state import ServerState

MARK = secrets.token_hex(16)  # random: occurs in no frame by chance


class Named(Protocol):
    """A body with an id and a priority."""

    request_id: str | None
    priority: int


def new_id(kind: str, request: Request, body: Named) -> str:
    """`{kind}X`: X is the header X-Request-Id, else the body's request_id, else the id of the answer's header, else
    random.
    """
    header = request.headers.get("x-request-id")
    if header is not None and not VALID_ID.fullmatch(header):
        raise invalid("the header X-Request-Id must have 1 to 256 visible ASCII characters")
    return (
        f"{kind}{header or body.request_id or request.scope.get(NEW_ID) or secrets.token_hex(16)}"
    )


def priority(request: Request, body: Named) -> int:
    """The header X-Vllm-Priority, else the body's priority; lower runs first."""
    header = request.headers.get("x-vllm-priority", "")
    return int(header) if re.fullmatch(r"-?\d{1,9}", header) else body.priority


def data_parallel_rank(request: Request) -> int | None:
    """The header X-data-parallel-rank: the engine that must serve the request; None, or another text: any."""
    header = request.headers.get("x-data-parallel-rank", "")
    return int(header) if re.fullmatch(r"\d{1,9}", header) else None


def interval(body: Sampling, state: ServerState) -> int:
    """Tokens between two events of a stream: the server's setting, or the request's if that is larger."""
    return max(state.config.server.stream_interval, body.stream_interval or 1)


def load_report(request: Request, state: ServerState) -> dict[str, str]:
    """The load header, which routers request with `endpoint-load-metrics-format: TEXT` (or JSON)."""
    form = request.headers.get("endpoint-load-metrics-format", "").upper()
    if form not in ("TEXT", "JSON") or state.engine is None:
        return {}
    stats = state.engine.stats()
    numbers = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": stats.waiting}
    if form == "JSON":
        text = msgspec.json.encode({"named_metrics": numbers}).decode()
    else:
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
    return {"endpoint-load-metrics": f"{form} {text}"}


class ChunkFrames:
    """Frames of one stream; their head is encoded once."""

    def __init__(self, kind: str, id: str, model: str, fingerprint: str, body: Sampling, state: ServerState):  # fmt: skip
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._print = b',"system_fingerprint":' + msgspec.json.encode(fingerprint)
        self.encode = msgspec.json.Encoder().encode
        options, force = body.stream_options, state.config.server.enable_force_include_usage
        self.final_usage = force or (options is not None and options.include_usage)
        self.running_usage = force or (
            self.final_usage and options is not None and options.continuous_usage_stats
        )

    def around(self, choice: Callable[[str], dict[str, Any]]) -> tuple[bytes, bytes]:
        """The bytes before and after the text, in the frame of a choice in which only the text changes."""
        before, _, behind = self.frame([choice(MARK)]).partition(self.encode(MARK))
        return before, behind

    def frame(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        last: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> bytes:
        """`last`: add the fingerprint, and the metrics if there are any."""
        parts = [self._head, b',"choices":', self.encode(choices)]
        if last:
            parts.append(self._print)
            if metrics is not None:
                parts += [b',"metrics":', self.encode(metrics)]
        if usage is not None:
            present = {key: value for key, value in usage.items() if value is not None}
            parts += [b',"usage":', self.encode(present)]
        parts.append(b"}\n\n")
        return b"".join(parts)


class ChunkEncoder:
    """Encodes deltas as frames. Once a choice has begun, most of its frames differ only in their text."""

    def __init__(self, frames: ChunkFrames, details: bool):
        self.frames, self.details = frames, details
        self.around: dict[int, tuple[bytes, bytes]] = {}
        """Choice -> the bytes around its text, for choices that have begun."""

    def add(self, delta: OutputDelta) -> Iterable[bytes]:
        around = self.around.get(delta.index)
        if around is None or delta.finish_reason is not None or delta.reasoning or delta.calls:
            return self.whole(delta)
        before, behind = around
        return (before + self.frames.encode(delta.text) + behind,) if delta.text else ()

    def whole(self, delta: OutputDelta) -> Iterable[bytes]:
        """Frames encoded in full. Sets `around` if the choice's next frames differ only in their text."""
        raise NotImplementedError
