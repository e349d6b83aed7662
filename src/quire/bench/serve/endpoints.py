"""One request of a load: its body for each kind of endpoint, and how to read the response stream.

Knows the bodies and events of OpenAI's three text endpoints. Does not know when a request is sent (`arrivals.py`) or
what its times mean (`metrics.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench.serve.http_client import HttpFailed, HttpTarget, reason


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    text: str
    length: int  # tokens, as estimated before it is sent
    output: int  # tokens requested
    sound: bytes = b""  # a file, in place of a text
    seconds: float = 0.0  # of the sound


@dataclass(slots=True)
class RequestRecord:
    """Result of one request. Times in seconds; for a failed request only `error` and `start` are valid."""

    prompt_tokens: int
    seconds: float = 0.0  # of sound
    start: float = 0.0  # time.perf_counter
    latency: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None if there are no others."""
        others = self.output_tokens - 1
        return (self.latency - self.ttft) / others if others > 0 else None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Content of one event."""

    text: str = ""
    started: bool = False  # an event of the answer, even without text
    usage: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of endpoint."""

    path: str
    prompt: Callable[[str], dict[str, Any]]
    limit: str  # the field for the number of requested tokens
    read: Callable[[dict[str, Any]], StreamEvent]
    asks_usage: bool = True
    form: Callable[[BenchPrompt, dict[str, Any]], tuple[bytes, str]] | None = None
    """Makes (body, content type) in place of a JSON body."""

    def body(self, prompt: BenchPrompt, ignore_eos: bool) -> dict[str, Any]:
        body = self.prompt(prompt.text) | {self.limit: prompt.output, "stream": True}
        if ignore_eos:  # not in OpenAI's API: sent only if requested
            body["ignore_eos"] = True
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        return body


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _read_completion(event: dict[str, Any]) -> StreamEvent:
    choices = event.get("choices") or []
    text = "".join(choice.get("text") or "" for choice in choices)
    return StreamEvent(text, bool(choices), event.get("usage"), _error(event))


def _read_chat(event: dict[str, Any]) -> StreamEvent:
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
    names = ("reasoning", "reasoning_content", "content")
    text = "".join(next((d[name] for name in names if d.get(name)), "") for d in deltas)
    begun = any("role" not in delta for delta in deltas)  # the first delta has only the role
    return StreamEvent(text, begun, event.get("usage"), _error(event))


def _read_response(event: dict[str, Any]) -> StreamEvent:
    match event.get("type"):
        case "response.output_text.delta" | "response.reasoning_text.delta":
            return StreamEvent(event.get("delta") or "", True)
        case "response.completed" | "response.incomplete":
            used = (event.get("response") or {}).get("usage") or {}
            names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
            return StreamEvent("", True, {ours: used.get(theirs) for ours, theirs in names.items()})
        case "response.failed" | "error":
            return StreamEvent(
                error=_error(event.get("response") or event) or "the response failed"
            )
    return StreamEvent()


def _error(event: dict[str, Any]) -> str:
    error = event.get("error") or event.get("message")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "")


KINDS = {
    "openai": Kind("/v1/completions", lambda text: {"prompt": text}, "max_tokens", _read_completion),
    "openai-chat": Kind("/v1/chat/completions", _messages, "max_completion_tokens", _read_chat),
    "openai-responses": Kind("/v1/responses", lambda text: {"input": text}, "max_output_tokens", _read_response, False),
}  # fmt: skip
KINDS["vllm"] = KINDS["quire"] = KINDS["openai"]


class SseReader:
    """Parses server-sent events as their bytes arrive, and records the time of each piece of text."""

    def __init__(self, kind: Kind, done: RequestRecord):
        self.read, self.done = kind.read, done
        self.rest, self.pieces = b"", list[str]()
        self.last = self.started = 0.0
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}

    def add(self, piece: bytes, when: float) -> None:
        lines = (self.rest + piece).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                self._event(data, when)

    def _event(self, data: bytes, when: float) -> None:
        try:
            event = msgspec.json.decode(data)
            said = self.read(event) if isinstance(event, dict) else StreamEvent()
        except (msgspec.DecodeError, AttributeError, TypeError):
            said = StreamEvent(error=f"an invalid event: {data[:200]!r}")
        if said.error:
            self.done.error = said.error
        if said.started:
            self.started = self.started or when
            self.last = when
        if said.text:
            self.times.append(when)
            self.pieces.append(said.text)
        if said.usage:
            self.usage = said.usage

    def end(self) -> None:
        """Fill in the results after the last event."""
        done, times = self.done, self.times
        if not self.started and not done.error:
            done.error = "the stream ended without output"
        if done.error:
            return
        first, last = (times[0] if times else self.started), self.last
        done.ttft, done.latency = first - done.start, last - done.start
        done.itls = [b - a for a, b in itertools.pairwise(times)]
        done.text = "".join(self.pieces)
        # If the server does not report usage, count one token per event.
        done.output_tokens = self.usage.get("completion_tokens") or len(times)
        done.prompt_tokens = self.usage.get("prompt_tokens") or done.prompt_tokens


async def ask(
    server: HttpTarget,
    kind: Kind,
    path: str,
    prompt: BenchPrompt,
    more: dict[str, Any],
    *,
    ignore_eos: bool,
    clock: Callable[[], float],
    headers: dict[str, str] | None = None,
) -> RequestRecord:
    """Send one prompt and read its stream to the end. Failures of the server are recorded, never raised.

    Args:
        more: fields that override the body's, `model` included.
    """
    if kind.form is not None:
        data, content_type = kind.form(prompt, more)
        headers = {**(headers or {}), "Content-Type": content_type}
    else:
        data = msgspec.json.encode(kind.body(prompt, ignore_eos) | more)
    done = RequestRecord(prompt.length, prompt.seconds, start=clock())
    stream = SseReader(kind, done)
    try:
        answer = await server.ask("POST", path, data, on_piece=stream.add, headers=headers)
    except HttpFailed as why:
        done.error = str(why)
        return done
    if answer.status != 200:
        done.error = f"{answer.status}: {reason(answer.body)}"
        return done
    stream.end()
    return done
