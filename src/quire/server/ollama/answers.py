"""Ollama's answers: lines of JSON, or one object.

Knows that protocol's shapes. Does not know requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from quire.frontend.parsers.call_writer import CallDelta
from quire.server.answer import GenerationAnswer
from quire.server.endpoint import RequestContext
from quire.server.errors import ApiError, as_api_error, clean
from quire.server.generation import Generation
from quire.server.output_delta import OutputDelta, merged
from quire.server.request_body import json_response

NANOSECONDS = 1_000_000_000


def error_response(error: ApiError) -> Response:
    return json_response({"error": clean(error.message)}, error.status, error.headers)


def created_at(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def line(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def loaded(model: str, content: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, by which clients load a model."""
    return json_response({"model": model, "created_at": created_at(), **content, "done": True, "done_reason": "load"})  # fmt: skip


class OllamaAnswer(GenerationAnswer):
    """`content` is the part in which chat and generate differ."""

    media_type = b"application/x-ndjson"
    keep_alive = b"\n"

    def __init__(self, context: RequestContext, body: Any, source: Generation):
        super().__init__(context, body, source)
        self.began, self.first = time.monotonic(), 0.0
        self.calls: list[CallDelta] = []

    def content(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def head(self) -> dict[str, Any]:
        return {"model": self.context.model, "created_at": created_at()}

    def last(self, delta: OutputDelta) -> dict[str, Any]:
        """The counts and times, in ns, with which an answer ends."""
        now, count = time.monotonic(), self.source.counts[0]
        first = self.first or now
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "total_duration": round(NANOSECONDS * (now - self.began)),
            "load_duration": 0,
            "prompt_eval_count": count.prompt_tokens,
            "prompt_eval_duration": round(NANOSECONDS * (first - self.began)),
            "eval_count": sum(count.output_tokens),
            "eval_duration": round(NANOSECONDS * (now - first)),
        }

    async def response(self, deltas: Sequence[OutputDelta]) -> Response:
        (delta,) = deltas
        content = self.content(delta.text, delta.reasoning, [call_of(call) for call in delta.calls])
        return json_response(self.head() | content | self.last(delta))

    def add(self, delta: OutputDelta) -> Iterator[bytes]:
        self.first = self.first or time.monotonic()
        self.calls = merged(self.calls, delta.calls)
        ended = delta.finish_reason is not None
        calls = [call_of(call) for call in self.calls] if ended else []
        if delta.text or delta.reasoning or calls:
            yield line(self.head() | self.content(delta.text, delta.reasoning, calls) | {"done": False})  # fmt: skip
        if ended:
            yield line(self.head() | self.content("", "", []) | self.last(delta))

    def end(self) -> Iterator[bytes]:
        return iter(())

    def failed(self, error: BaseException) -> bytes:
        return line({"error": clean(as_api_error(error).message)})


class OllamaChatAnswer(OllamaAnswer):
    def content(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer):
    def content(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thoughts} if thoughts else {})


def call_of(call: CallDelta) -> dict[str, Any]:
    """A tool call. Its arguments are an object; what the model wrote otherwise is in `text`."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"text": call.arguments}
    return {"function": {"index": call.index, "name": call.name, "arguments": arguments}}
