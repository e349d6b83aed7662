"""Common to completions and chat: the head of an answer and of a frame, usage, fingerprint.

Knows OpenAI's outer shapes. Does not know choices.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.server.answer import GenerationAnswer
from quire.server.endpoint import RequestContext
from quire.server.generation import Generation
from quire.server.output_delta import OutputDelta
from quire.server.schemas import Sampling
from quire.server.sse import DONE
from quire.server.state import ServerState
from quire.server.streaming_json import listed

MARK = secrets.token_hex(16)  # random: occurs in no frame by chance


def interval(body: Sampling, state: ServerState) -> int:
    """Tokens between two events of a stream: the server's setting, or the request's if that is larger."""
    return max(state.config.server.stream_interval, body.stream_interval or 1)


def load_report(context: RequestContext) -> dict[str, str]:
    """The load header, which routers request with `endpoint-load-metrics-format: TEXT` (or JSON)."""
    form = context.request.headers.get("endpoint-load-metrics-format", "").upper()
    if form not in ("TEXT", "JSON"):
        return {}
    stats = context.engine.stats()
    numbers = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": stats.waiting}
    if form == "JSON":
        text = msgspec.json.encode({"named_metrics": numbers}).decode()
    else:
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items())
    return {"endpoint-load-metrics": f"{form} {text}"}


def envelope(
    kind: str, id: str, source: Generation, context: RequestContext, choices: Any, usage: Any
) -> dict[str, Any]:
    """The fields with which an answer in one piece begins. `kind`: its `object`."""
    return {
        "id": id,
        "object": kind,
        "created": source.created,
        "model": context.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": context.state.fingerprint,
        "usage": usage,
    }


class ChunkAnswer(GenerationAnswer):
    """Chunks are encoded in full only where it matters: once a choice has begun, most of them differ only in their text."""

    kind, chunk_kind = "", ""
    """The `object` of an answer, and of a chunk."""

    def __init__(self, context: RequestContext, body: Any, source: Generation):
        super().__init__(context, body, source)
        head = {"id": source.id, "object": self.chunk_kind, "created": source.created, "model": context.model}  # fmt: skip
        self.encode = msgspec.json.Encoder().encode
        self._head = b"data: " + self.encode(head)[:-1]
        self._print = b',"system_fingerprint":' + self.encode(context.state.fingerprint)
        options, force = body.stream_options, context.state.config.server.enable_force_include_usage
        self.final_usage = force or (options is not None and options.include_usage)
        self.running_usage = force or (
            self.final_usage and options is not None and options.continuous_usage_stats
        )
        self.around: dict[int, tuple[bytes, bytes]] = {}
        """Choice -> the bytes before and after the text of its next frames."""

    # -- in one piece ---------------------------------------------------------------------------
    def choice(self, delta: OutputDelta, large: bool = False) -> dict[str, Any]:
        """A choice of an answer in one piece."""
        raise NotImplementedError

    def headers(self) -> dict[str, str]:
        return load_report(self.context)

    def whole(self, deltas: Sequence[OutputDelta], large: bool) -> dict[str, Any]:
        choices = listed(partial(map, partial(self.choice, large=large), deltas), large)
        return envelope(self.kind, self.source.id, self.source, self.context, choices, self.usage())

    # -- streamed -------------------------------------------------------------------------------
    def add(self, delta: OutputDelta) -> Iterable[bytes]:
        around = self.around.get(delta.index)
        if around is None or delta.finish_reason is not None or delta.reasoning or delta.calls:
            return self.frames(delta)
        before, after = around
        return (before + self.encode(delta.text) + after,) if delta.text else ()

    def frames(self, delta: OutputDelta) -> Iterable[bytes]:
        """Frames encoded in full."""
        raise NotImplementedError

    def only_text_follows(self, choice: dict[str, Any]) -> None:
        """The next frames of this choice differ from this one, whose text is MARK, only in their text."""
        before, _, after = self.frame([choice]).partition(self.encode(MARK))
        self.around[choice["index"]] = before, after

    def end(self) -> Iterable[bytes]:
        return (self.frame([], self.usage(), True), DONE) if self.final_usage else (DONE,)

    def frame(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        last: bool = False,
    ) -> bytes:
        """`last`: add the fingerprint, and the metrics if there are any."""
        parts = [self._head, b',"choices":', self.encode(choices)]
        if last:
            parts.append(self._print)
            if self.source.metrics is not None:
                parts += [b',"metrics":', self.encode(self.source.metrics)]
        if usage is not None:
            present = {key: value for key, value in usage.items() if value is not None}
            parts += [b',"usage":', self.encode(present)]
        parts.append(b"}\n\n")
        return b"".join(parts)
