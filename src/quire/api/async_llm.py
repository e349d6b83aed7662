"""AsyncLLM: streams for many callers on one engine, in one event loop.

    caller   generate() ---------------- take() --> RequestOutput
                 |                          ^
    loop     RequestManager.send     RequestManager.process_outputs
                 |                          ^
    thread       `---> client ----- outputs()

One thread waits for the engine's outputs and posts them to the loop. All else runs in the loop, without locks.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Self

from quire import env
from quire.api.metrics import engine_stats
from quire.api.stream import OutputStream
from quire.api.unsupported import Later
from quire.config.engine import EngineConfig
from quire.engine import sleep, sleep_client
from quire.engine.client import EngineClient
from quire.errors import EngineDeadError, QuireError, Unsupported, ValidationError
from quire.frontend.input_processor import AcceptedRequest
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import RequestOutput
from quire.frontend.prompts import read_prompt
from quire.frontend.request_manager import RequestManager
from quire.frontend.tokenizer import Tokenizer
from quire.logging import get_logger
from quire.observe.stats_log import StatsLog
from quire.protocol.output import EngineOutput
from quire.protocol.sampling_params import SamplingParams

log = get_logger(__name__)

BREATH_S = 0.01  # how long sending one request may occupy the loop at a time
LONG_TEXT = 20_000  # characters: about 5 ms of tokenizing, for which other streams would wait


class AsyncLLM(Later):
    """`async for output in llm.generate("Once", SamplingParams(...), "my-id"): ...`

    `SamplingParams.output_kind` selects what each output contains. Use it in one event loop at a time.
    """

    def __init__(self, client: EngineClient, config: EngineConfig | None = None):
        self.client = client
        self.config = config or client.resolved.asked
        self.front = RequestManager(client)
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._close = weakref.finalize(self, client.close)
        self._stats = StatsLog(lambda: engine_stats(client))
        self.in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread
        """Runs calls that would block the loop; a server sets threads of its own for that."""

    @classmethod
    def from_client(cls, client: EngineClient, config: EngineConfig | None = None) -> Self:
        """Make one on a running engine; loads the tokenizer."""
        return cls(client, config)

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, start_engine_loop: bool = True, usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> Self:  # fmt: skip
        """Make one from an EngineArgs. The engine gets its own process, so that it does not block the event loop
        (unless QUIRE_ENABLE_V1_MULTIPROCESSING=0).

        Raises:
            ConfigError, StartupError: as `engine.build.make_client`.
            Unsupported: stat_loggers.
        """
        if stat_loggers:
            raise Unsupported("stat_loggers", "read /metrics, or LLM.get_metrics()")
        return cls.from_config(engine_args.create_engine_config())

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Make one from a configuration; as `from_engine_args`."""
        from quire.engine.build import make_client  # not needed with a given client

        client: EngineClient
        if env.get("ENABLE_V1_MULTIPROCESSING"):
            client = make_client(config, process=True)
        else:
            client = make_client(config)
        try:
            made = cls(client, config)
        except BaseException:
            client.close()
            raise
        made.front.logs_requests = config.observe.enable_log_requests
        return made

    from_vllm_config = from_config

    # -- requests -------------------------------------------------------------------------------
    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
        arrival_time: float | None = None,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request's outputs as they arrive. Leaving the loop early aborts the request.

        Args:
            request_id: must differ from the ids of all running requests.
            trace_headers, session_id: accepted; they have no effect.
            prompt_text: reported as `prompt` when the prompt is given as token ids.
            tenant: the owner of the request, for fair scheduling among tenants.

        Raises:
            ValidationError: the request is invalid, or its id is in use.
            QueueFull: too many requests wait.
            EngineDeadError: the engine has stopped.
        """
        if data_parallel_rank:
            raise Unsupported("data_parallel_rank", "there is one engine")
        if hasattr(prompt, "__aiter__"):
            raise Unsupported("a prompt that is streamed in", "give all of it")
        news = asyncio.Event()
        stream = await self.open(
            prompt, sampling_params, request_id, news.set, lora_request=lora_request, priority=priority,
            tokenization_kwargs=tokenization_kwargs, prompt_text=prompt_text, arrived=arrival_time,
            tenant=tenant,
        )  # fmt: skip
        with closing(stream):
            while not stream.ended:
                if (output := stream.take()) is not None:
                    yield output
                elif not stream.ended:
                    await news.wait()
                    news.clear()

    async def open(
        self, prompt: Any, params: SamplingParams | None, request_id: str, heard: Callable[[], None],
        *, prompt_text: str | None = None, **options: Any,
    ) -> OutputStream:  # fmt: skip
        """As `generate`, but returns a stream instead of an iterator; the request runs until the stream is closed.

        Args:
            heard: called in the loop when there may be a new output.
        """
        self._enter_loop()
        accepted = await self._accept(prompt, params, id=request_id, **options)
        if prompt_text is not None:
            accepted.prompt = accepted.prompt or prompt_text
        self.check_alive()
        collector = self.front.register(accepted)
        stream = self._streams[request_id] = OutputStream(self, collector, heard)
        try:
            await self._send(accepted, collector)
        except BaseException:
            self.closed(stream)
            raise
        return stream

    async def _send(self, accepted: AcceptedRequest, collector: OutputProcessor) -> None:
        """Send it to the engine. Lets other callbacks run between copies: encoding many of them takes time."""
        until = time.monotonic() + BREATH_S
        for child in accepted.children:
            if time.monotonic() > until:
                await asyncio.sleep(0)
                self.check_alive()
                if self.front.live.get(collector.id) is not collector:
                    return  # it was aborted
                until = time.monotonic() + BREATH_S
            self.front.send(collector, child)

    def closed(self, stream: OutputStream) -> None:
        """Remove a closed stream; abort its request if it still runs."""
        collector = stream.collector
        if self._streams.get(collector.id) is stream:
            del self._streams[collector.id]
        if not collector.finished and self.front.live.get(collector.id) is collector:
            with suppress(EngineDeadError):
                self.front.abort([collector.id])

    async def _accept(
        self, prompt: Any, params: SamplingParams | None, **options: Any
    ) -> AcceptedRequest:
        if not options["id"]:
            raise ValidationError("request_id must be a text of your own", parameter="request_id")
        given = read_prompt(prompt)
        takes_time = params is not None and params.structured_outputs is not None
        if takes_time or (given.tokens is None and len(given.text or "") > LONG_TEXT):
            accepted: AcceptedRequest = await self.in_thread(
                self.front.accept, given, params, **options
            )
            return accepted
        return self.front.accept(given, params, **options)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their streams end with finish_reason "abort". Ignores unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for collector in self.front.abort(ids):
            self._tell(collector)

    def _tell(self, collector: OutputProcessor) -> None:
        if (stream := self._streams.get(collector.id)) is not None:
            stream.heard()

    # -- the loop and the thread ----------------------------------------------------------------
    async def listen(self) -> None:
        """Process the engine's outputs from now on, not only from the first request on."""
        self._enter_loop()

    def _enter_loop(self) -> None:
        """Raises EngineDeadError; RuntimeError: another loop uses this object."""
        self.check_alive()
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._streams and not self._loop.is_closed():
            raise RuntimeError(
                "this AsyncLLM has requests in another event loop: make one for each loop"
            )
        first, self._loop = self._loop is None, loop
        self._streams.clear()
        self.front.abort(list(self.front.live))  # requests of a closed loop
        if first:
            threading.Thread(
                target=_pump, args=(self.client, weakref.ref(self)), name="quire-outputs", daemon=True
            ).start()  # fmt: skip

    def _take_in(self, outputs: list[EngineOutput]) -> None:
        try:
            for collector in self.front.process_outputs(outputs):
                self._tell(collector)
        except EngineDeadError as error:
            self._fail(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # a bug, or a tokenizer's panic, must not leave streams waiting forever
            log.exception("the front room failed")
            self._fail(EngineDeadError(f"the front room failed: {type(error).__name__}: {error}"))

    def _fail(self, error: EngineDeadError) -> None:
        if self._dead is None:
            self._dead = error
        for stream in list(self._streams.values()):
            stream.heard()

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        """Called in the thread: run `call` in the loop. Ignores a closed loop, which has no waiters."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call, *args)

    # -- state ----------------------------------------------------------------------------------
    def check_alive(self) -> None:
        """Raises EngineDeadError: the engine will never answer again."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    async def check_health(self) -> None:
        """Raises EngineDeadError: the engine will never answer again."""
        self.check_alive()

    @property
    def is_running(self) -> bool:
        return self._dead is None

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        return self._dead is not None

    @property
    def dead_error(self) -> BaseException:
        return self._dead or EngineDeadError("the engine has stopped")

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine. Streams that still run end with EngineDeadError."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        self._close()
        self._post(self._fail, self._dead)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Block new requests until `resume_generation`. `mode`: what happens to running requests: "abort", "wait"
        (until they end) or "keep" (they stop, and continue later).

        Raises:
            ValidationError: an unknown mode.
            Conflict: another caller resumed before all requests had ended.
        """
        await sleep_client.pause(self.call, mode)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        await self.call("resume")

    async def is_paused(self) -> bool:
        return bool(await self.call("is_paused"))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As `LLM.sleep`; requests that arrive meanwhile wait."""
        await sleep_client.sleep(self.call, level, mode)

    async def release_kv_cache_memory(self) -> None:
        """As `LLM.release_kv_cache_memory`; also possible after a pause."""
        await sleep_client.release(self.call)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """As `LLM.wake_up`."""
        return not await self.call("wake_up", list(sleep.checked_tags(tags)))

    async def is_sleeping(self) -> bool:
        return bool(await self.call("is_sleeping"))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request runs.

        Raises:
            TimeoutError: some still run after that many seconds.
        """
        end = asyncio.get_running_loop().time() + drain_timeout
        while self.front.live:
            self.check_alive()
            if asyncio.get_running_loop().time() >= end:
                raise TimeoutError(
                    f"{len(self.front.live)} requests still run after {drain_timeout} s"
                )
            await asyncio.sleep(0.01)

    # -- about the engine -----------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's configuration as requested."""
        return self.config.model

    async def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        """Raises ValidationError: skip_tokenizer_init=True left the tokenizer out."""
        return self.front.need_tokenizer()

    async def get_model_config(self) -> Any:
        return self.config.model

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def do_log_stats(self) -> None:
        """Write the statistics line now."""
        await asyncio.to_thread(self._stats.tick, self._stats.interval)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drop cached prefixes. False if running requests use some: these stay, unless `reset_running_requests`
        preempts the requests."""
        return bool(await self.call("reset_prefix_cache", reset_running_requests))

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call a method of every worker by its name; returns one result per worker."""
        return list(await self.call("collective_rpc", method, list(args), dict(kwargs or {})))

    async def call(self, name: str, *args: Any) -> Any:
        """Call a named function of the engine, without blocking the loop."""
        return await asyncio.to_thread(self.client.call, name, *args)


def _pump(client: EngineClient, reference: weakref.ref[AsyncLLM]) -> None:
    """The output thread. It must not keep the AsyncLLM alive: a dropped AsyncLLM closes its client, which ends this."""
    while True:
        try:
            outputs = client.outputs()
        except Exception as error:
            if (llm := reference()) is not None:
                dead = error if isinstance(error, EngineDeadError) else _as_dead(error)
                llm._dead = llm._dead or dead  # the loop may be closed, and the next one must know
                llm._post(llm._fail, dead)
            return
        if (llm := reference()) is not None:
            llm._post(llm._take_in, outputs)
        del llm


def _as_dead(error: Exception) -> EngineDeadError:
    if not isinstance(error, QuireError):
        log.error("waiting for the engine failed", exc_info=error)
    return EngineDeadError(f"{type(error).__name__}: {error}")
