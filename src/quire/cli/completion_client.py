"""Common part of `quire chat` and `quire complete`: their flags, and the two clients that get answers.

    --url given    a running server, over HTTP (any that implements OpenAI's API)
    otherwise      the model, loaded into this process

Knows flags, HTTP streams and the frontend. Does not know terminals.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from quire import env
from quire.config import flags, from_keywords
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.startup_timer import Report, no_report

if TYPE_CHECKING:  # this process needs them only if it loads the model
    from quire.frontend.parsers.model_formats import OutputFormat
    from quire.frontend.parsers.stream_parser import StreamParser
    from quire.protocol.sampling_params import SamplingParams

COMPLETION_TOKENS = 256
"""Of `quire complete`, where --max-tokens is not given; a chat's answer ends itself."""
CONNECT_S = 10.0
SILENCE_S = 600.0  # a busy server may take long until the first token


@dataclass(slots=True)
class ClientOptions:
    """Options from the command line."""

    config: EngineConfig
    url: str | None = None
    api_key: str | None = None
    model_name: str | None = None
    system_prompt: str | None = None
    quick: str | None = None
    stats: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


SAMPLING = {"max_tokens": int, "temperature": float, "top_p": float, "seed": int}
HELP = """usage: quire {command} [MODEL] [flags]

Loads MODEL (default: quire-tiny, the embedded model) and {what}.
With --url it uses a running server instead and loads no model.

--url URL             address of a server, such as http://localhost:8000/v1
--api-key KEY         API key of the server; unset: QUIRE_API_KEY, VLLM_API_KEY or OPENAI_API_KEY
--model-name NAME     name of a model of the server; unset: its first model
{system}-q, --quick TEXT      send one {thing}, print the answer and exit
--max-tokens N        maximum number of tokens of an answer{length}
--temperature X       sampling temperature; 0: greedy
--top-p X             sample from the most likely tokens whose probabilities sum to X
--stats               print chunks, time to the first chunk and chunks per second after each answer
All engine flags are accepted too: see quire serve --help=all.
"""


def read(command: str, argv: Sequence[str]) -> ClientOptions:
    """Parse flags. Ends the program on --help (0) and on a usage error (2)."""
    parser = flags.make_parser(f"quire {command}")
    if any(word in ("-h", "--help") for word in argv):
        chat = command == "chat"
        print(
            HELP.format(
                command=command,
                what="chats with you" if chat else "completes your texts",
                thing="message" if chat else "text",
                length="" if chat else f"; unset: {COMPLETION_TOKENS}",
                system="--system-prompt TEXT  system message of the conversation\n" if chat else "",
            ),
            end="",
        )
        parser.exit(0)
    for name in ("--url", "--model-name", "--system-prompt"):
        parser.add_argument(name)
    for name, kind in SAMPLING.items():
        if name != "seed":  # the engine has this flag
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--quick")
    # Here -q means --quick, as in `vllm chat`; the engine's -q must be written --quantization.
    words = ["--quick" if word == "-q" else word for word in argv]
    parser.add_argument("--stats", action="store_true")
    try:
        given = flags.keywords(words, parser)
        own = {name: given.pop(name, None) for name in ("url", "model_name", "system_prompt", "quick")}  # fmt: skip
        sampling = {name: given.pop(name) for name in SAMPLING if name in given and name != "seed"}
        stats = bool(given.pop("stats", False))
        config = from_keywords.engine_config({"log_level": "WARNING", **given}, "flag")
    except (QuireError, TypeError, ValueError) as why:
        parser.error(str(why))
    keys = config.server.api_key
    key = keys if isinstance(keys, str) else keys[0] if keys else env.outer("OPENAI_API_KEY")
    return ClientOptions(config, api_key=key, stats=stats, sampling=sampling, **own)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of an answer. The last one of an answer that was not stopped has `finish_reason`."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None
    """Of the whole answer; only with `finish_reason`, and None if the server does not report it."""


class CompletionClient(Protocol):
    """Gets answers from a model."""

    name: str
    sampling: dict[str, Any]
    """Parameters of the next requests."""

    def chat(self, messages: list[dict[str, str]]) -> Iterator[AnswerDelta]:
        """Closing the iterator early ends the request."""

    def complete(self, prompt: str) -> Iterator[AnswerDelta]: ...

    def close(self) -> None: ...


def connect(options: ClientOptions, report: Report = no_report) -> CompletionClient:
    """`report`: receives the progress of loading. Raises QuireError: the server cannot be reached, or the model cannot be loaded."""
    return RemoteClient(options) if options.url is not None else LocalClient(options, report)


class RemoteClient:
    """A server that implements OpenAI's API."""

    def __init__(self, options: ClientOptions):
        url = options.url if "://" in (options.url or "") else f"http://{options.url}"
        self.parts = urlsplit(url or "")
        if self.parts.scheme not in ("http", "https") or not self.parts.hostname:
            raise ConfigError(f"--url {options.url}: must be an http or https address")
        self.base = self.parts.path.rstrip("/")
        self.base = self.base if self.base.endswith("/v1") else f"{self.base}/v1"
        self.headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if options.api_key:
            self.headers["Authorization"] = f"Bearer {options.api_key}"
        self.sampling = options.sampling
        self.name = options.model_name or self._first_model()

    def chat(self, messages: list[dict[str, str]]) -> Iterator[AnswerDelta]:
        return self._answer("/chat/completions", {"messages": messages})

    def complete(self, prompt: str) -> Iterator[AnswerDelta]:
        return self._answer("/completions", {"max_tokens": COMPLETION_TOKENS, "prompt": prompt})

    def close(self) -> None:
        pass

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            answer = self._ask(connection, "GET", "/models", None)
            models = json.loads(answer.read()).get("data") or []
        if not models:
            raise QuireError(f"{self.parts.geturl()} has no model; check --url")
        return str(models[0]["id"])

    def _connect(self) -> http.client.HTTPConnection:
        secure = self.parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self.parts.hostname or "", self.parts.port, timeout=CONNECT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(SILENCE_S)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self.base + path, data, self.headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as why:
            raise QuireError(f"{self.parts.geturl()} does not answer: {why}") from why
        if answer.status != 200:
            raise QuireError(
                f"{self.parts.geturl()} answered {answer.status}: {error_message(answer)}"
            )
        return answer

    def _answer(self, path: str, body: dict[str, Any]) -> Iterator[AnswerDelta]:
        finish_reason, num_tokens = None, None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for frame in self._frames(path, {"model": self.name, **options, **body, **self.sampling}):
            num_tokens = (frame.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in (frame.get("choices") or [])[:1]:
                finish_reason = choice.get("finish_reason") or finish_reason
                delta = choice.get("delta") or {}
                # Older servers name the field `reasoning_content`.
                reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                yield AnswerDelta(delta.get("content") or choice.get("text") or "", reasoning)
        yield AnswerDelta(finish_reason=finish_reason, num_tokens=num_tokens)

    def _frames(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with closing(self._connect()) as connection:
            answer = self._ask(connection, "POST", path, body)
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                frame = json.loads(data)
                if "error" in frame:
                    raise QuireError(str(frame["error"].get("message", frame["error"])))
                yield frame


def error_message(answer: http.client.HTTPResponse) -> str:
    """The message of an error response, in any format."""
    text = answer.read(4096).decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip() or answer.reason


class LocalClient:
    """A model in this process."""

    def __init__(self, options: ClientOptions, report: Report = no_report):
        from quire.frontend.request_manager import RequestManager
        from quire.frontend.startup import start_engine

        self.client, tokenizer = start_engine(options.config, report=report)
        self.front = RequestManager(self.client, tokenizer=tokenizer)
        self.sampling, self.name, self.count = options.sampling, options.config.model.model, 0

    def chat(self, messages: list[dict[str, str]]) -> Iterator[AnswerDelta]:
        text = self.front.render(messages)
        tokens = self.front.tokenizer.encode(text, False) if self.front.tokenizer else []
        formats = self.front.formats
        reasoning_open = None if formats.reasoning is None else formats.reasoning.is_open(text)
        reading = formats.output_format((), reasoning_open=reasoning_open)
        return self._generate({"prompt_token_ids": tokens}, None, reading)

    def complete(self, prompt: str) -> Iterator[AnswerDelta]:
        return self._generate(prompt, COMPLETION_TOKENS, None)

    def close(self) -> None:
        self.client.close()

    def _generate(
        self, prompt: Any, max_tokens: int | None, reading: OutputFormat | None
    ) -> Iterator[AnswerDelta]:
        """`max_tokens`: unless the user set it; None: the room that is left in the context."""
        from quire.frontend.outputs import error_of

        self.count += 1
        params = self._params(max_tokens, reading is not None and reading.markers_are_special)
        accepted = self.front.accept_generation(prompt, params, id=f"talk-{self.count}")
        collector = self.front.submit(accepted)
        parser, num_tokens = reading.parser() if reading else None, 0
        try:
            while True:
                for changed in self.front.process_outputs(self.client.outputs()):
                    if changed is not collector or (output := changed.take()) is None:
                        continue
                    if (error := error_of(output)) is not None:
                        raise error
                    for part in output.parts:
                        num_tokens += len(part.token_ids)
                        yield parsed(parser, part.text, output.finished)
                    if output.finished:
                        yield AnswerDelta("", "", output.parts[0].finish_reason, num_tokens)
                        return
        finally:
            self.front.abort([accepted.id])

    def _params(self, max_tokens: int | None, keep_special_tokens: bool) -> SamplingParams:
        from quire.protocol.sampling_params import RequestOutputKind, SamplingParams

        defaults = self.front.inputs.defaults
        limit = defaults.max_tokens(self.sampling.get("max_tokens", max_tokens))
        given = {**defaults.sampling, **self.sampling, "max_tokens": limit}
        return SamplingParams(
            **given,
            output_kind=RequestOutputKind.DELTA,
            skip_special_tokens=not keep_special_tokens,
        )


def parsed(parser: StreamParser | None, text: str, finished: bool) -> AnswerDelta:
    """New text of an output, its reasoning apart. `finished`: it is the last."""
    if parser is None:
        return AnswerDelta(text)
    delta = parser.feed(text)
    if finished:
        delta.add(parser.finish())
    return AnswerDelta(delta.content, delta.reasoning)


class TimingLine:
    """Measures how fast an answer arrives."""

    def __init__(self, pieces: Iterator[AnswerDelta]):
        self.pieces, self.count, self.first = pieces, 0, 0.0
        self.began = self.last = time.monotonic()

    def __iter__(self) -> Iterator[AnswerDelta]:
        for piece in self.pieces:
            if piece.text or piece.reasoning:
                self.last = time.monotonic()
                self.first = self.first or self.last
                self.count += 1
            yield piece

    def __str__(self) -> str:
        if not self.first:
            return "[no output]"
        line = f"[{self.count} chunks, the first after {1000 * (self.first - self.began):.0f} ms"
        if self.count > 1 and self.last > self.first:
            line += f", {(self.count - 1) / (self.last - self.first):.1f} per second"
        return f"{line}]"
