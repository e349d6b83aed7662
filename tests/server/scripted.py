"""A text engine with scripted output, for tests of HTTP alone.

Its tokens are the code points of characters, so that every test can read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import SimpleNamespace as Object
from typing import Any

from quire.api.async_engine import AsyncEngine
from quire.config.engine import EngineConfig
from quire.engine.feature import Feature
from quire.errors import EngineDeadError, ValidationError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.parsers.model_formats import ModelFormats
from quire.frontend.pooling.inputs import not_pooling
from quire.observe.prometheus import ServerMetrics
from quire.protocol.output import EngineStats
from quire.server.openai.sampling_params import FINAL_ONLY
from quire.server.state import ServerPhase, ServerState

CREATED = 1_700_000_000


class Stream:
    """A request of it: what its generator says, taken one output at a time."""

    def __init__(
        self, engine: ScriptedEngine, name: str, outputs: AsyncGenerator[Object, None], heard: Any
    ):
        self.engine, self.name, self.heard = engine, name, heard
        self.said: list[Object | BaseException] = []
        self.finished = self.ended = False
        self.task = asyncio.ensure_future(self.read(outputs))

    async def read(self, outputs: AsyncGenerator[Object, None]) -> None:
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    self.said.append(output)
                    self.heard()
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self.said.append(error)
                self.heard()

    def take(self) -> Object | None:
        if not self.said:
            return None
        output = self.said.pop(0)
        if isinstance(output, BaseException):
            raise output
        if self.said:
            self.heard()  # there is more
        self.ended = self.finished = output.finished
        return output

    def close(self) -> None:
        self.task.cancel()
        self.engine.closed.append(self.name)
        if not self.finished:
            self.engine.aborted.append(self.name)


class ScriptedEngine(AsyncEngine):
    """Answers each request with `script`: texts, one an output; an exception is raised at its place.

    Its prompts pass the real `InputProcessor`. It is its own frontend and tokenizer.
    """

    max_model_len = 64
    eos_token_id = None
    template_text, special_texts, special_tokens_map = "", (), {}  # type: ignore[var-annotated]
    has_chat_template = True
    template_is_isolated = False
    pooling = None

    def __init__(self, *script: str | Exception, finish: str = "stop"):
        self.front = self.client = self  # type: ignore[assignment]
        self.features: list[Feature] = []
        self.readers: dict[str, Any] = {}
        self.engines = [self]
        self.inputs = InputProcessor(self, self.max_model_len, 0x110000)  # type: ignore[arg-type]
        self.script: Sequence[str | Exception] = script or ("Hel", "lo")
        self.finish = finish
        self.gate: asyncio.Event | None = None  # outputs after the first wait for it
        self.held: asyncio.Event | None = None  # all outputs wait for it
        self.asleep = False
        self.asked: list[Object] = []
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.called: list[tuple[Any, ...]] = []
        self.dead: str | None = None
        self.cached, self.replaced = 0, False

    def encode(self, text: str, special: bool = True) -> list[int]:
        return ([1] if special else []) + [ord(char) for char in text]

    def get_vocab(self) -> dict[str, int]:
        return {"x" * 1_000_000: 0}  # any text may fit

    def decode(self, tokens: list[int], *, skip_special: bool = False) -> str:
        return "".join(chr(token) for token in tokens if token != 1)

    def token_text(self, token: int) -> str:
        return chr(token)

    def need_generation(self, what: str) -> None:
        pass

    def need_pooling(self, what: str) -> Any:
        raise not_pooling(what)

    def need_tokenizer(self) -> ScriptedEngine:
        return self

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [chr(token) for token in tokens]

    def render(self, messages: list[dict[str, Any]], options: Any) -> str:
        if any(message["role"] == "alien" for message in messages):
            raise ValidationError("the template knows no aliens", parameter="messages")
        lines = [f"{message['role'][0]}:{message.get('content') or ''}" for message in messages]
        return "\n".join(lines) + ("\na:" if options.add_generation_prompt else "")

    async def open(
        self, prompt: Any, params: Any, request_id: str, heard: Any, *, priority: int = 0, tenant: str = "", inner: bool = False,
        arrived: float | None = None, adapter: str | None = None, data_parallel_rank: int | None = None,
    ) -> Stream:  # fmt: skip
        self.asked.append(
            Object(
                prompt=prompt,
                params=params,
                id=request_id,
                priority=priority,
                tenant=tenant,
                arrived=arrived,
            )
        )
        return Stream(self, request_id, self.generate(prompt, params, request_id), heard)

    async def generate(
        self, prompt: Any, params: Any, request_id: str
    ) -> AsyncGenerator[Object, None]:
        if self.held is not None:
            await self.held.wait()
        if params.output_kind == FINAL_ONLY:
            texts = [text for text in self.script if isinstance(text, str)]
            failures = [one for one in self.script if isinstance(one, Exception)]
            if self.gate is not None:
                await self.gate.wait()
            if failures:
                raise failures[0]
            yield self.output(prompt, params, request_id, "".join(texts), True)
            return
        for at, text in enumerate(self.script):
            if at and self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            if isinstance(text, Exception):
                raise text
            yield self.output(prompt, params, request_id, text, at + 1 == len(self.script))

    def output(self, prompt: Any, params: Any, request_id: str, text: str, ended: bool) -> Object:
        outputs = []
        for index in range(params.n):
            ids = [ord(char) for char in text]
            outputs.append(
                Object(
                    details={},
                    index=index,
                    text=text,
                    token_ids=ids,
                    logprobs=None
                    if params.logprobs is None
                    else [self.position(token, params.logprobs) for token in ids],
                    finish_reason=self.finish if ended else None,
                    stop_reason=None,
                    error="boom" if self.finish == "error" else None,
                    error_kind="internal",
                )
            )
        told = None
        if params.prompt_logprobs is not None:
            told = [
                None,
                *(self.position(token, params.prompt_logprobs) for token in prompt.tokens[1:]),
            ]
        return Object(
            request_id=request_id,
            prompt_token_ids=prompt.tokens,
            prompt_logprobs=told,
            outputs=outputs,
            finished=ended,
            num_cached_tokens=self.cached,
            num_cache_creation_tokens=0,
            cached_tokens_by_source=None,
        )

    def position(self, token: int, top: int) -> dict[int, Object]:
        """The chosen token has rank 1, and the next ones follow it."""
        return {
            token + rank: Object(
                logprob=-0.5 - rank, rank=rank + 1, decoded_token=chr(token + rank)
            )
            for rank in range(max(1, top))
        }

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def check(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def is_ready(self) -> bool:
        return not self.replaced

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.asked) - len(self.closed), num_blocks=10, block_size=16)

    async def call(self, name: str, *args: Any) -> Any:
        self.called.append((name, *args))
        match name:
            case "collective_rpc":
                return [args]
            case "hold":
                self.held = asyncio.Event()
                return 0
            case "resume" if self.held is not None:
                self.held.set()
                self.held = None
            case "is_paused":
                return self.held is not None
            case "sleep" | "wake_up":
                self.asleep = name == "sleep"
                return self.asleep or (["kv_cache"] if args == (["weights"],) else [])
            case "release_kv_cache":
                return None
            case "is_sleeping":
                return self.asleep
        return True


def make_state(engine: ScriptedEngine | None, **keywords: Any) -> ServerState:
    """A serving state around an engine; `keywords` are configuration, flat."""
    keywords.setdefault("served_model_name", "toy")
    config = EngineConfig.from_keywords(**keywords)
    state = ServerState(config, ServerMetrics("toy", process=False))
    if engine is not None:
        serve(state, engine)
        state.metrics.attach(engine.stats, engine.max_model_len, {"block_size": 16})
    return state


def serve(state: ServerState, engine: ScriptedEngine) -> None:
    """As ServerState.attach, without metrics."""
    engine.in_thread, engine.formats = state.texts.run_sized, ModelFormats.of(state.config.server)
    engine.formats.log_choices()
    state.fingerprint, state.created = "scripted", CREATED
    state.engine, state.phase = engine, ServerPhase.READY
