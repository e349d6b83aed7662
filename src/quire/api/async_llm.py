"""AsyncLLM: vLLM's asynchronous interface, over `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

from quire import env
from quire.api.async_engine import AsyncEngine
from quire.api.collective_rpc import worker_call
from quire.api.lora_calls import added
from quire.api.media_calls import AsyncMediaCalls
from quire.api.metrics import engine_stats
from quire.api.profiler_calls import AsyncProfilerCalls
from quire.api.stat_loggers import StatLoggers
from quire.api.unsupported import UnsupportedMethods
from quire.api.vllm_config_view import EngineFacts
from quire.config.engine import EngineConfig
from quire.engine import sleep, sleep_client
from quire.engine.client import EngineClient
from quire.errors import EngineDeadError, Unsupported
from quire.frontend.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.startup import start_engine
from quire.frontend.tokenizer import Tokenizer
from quire.observe.stats_log import StatsLog
from quire.protocol.lora_request import LoRARequest
from quire.protocol.pooling_params import PoolingParams
from quire.protocol.request import RequestParams


class AsyncLLM(AsyncEngine, EngineFacts, AsyncMediaCalls, AsyncProfilerCalls, UnsupportedMethods):
    """`async for output in llm.generate("Once", SamplingParams(...), "my-id"): ...`

    `SamplingParams.output_kind` selects what each output contains. Use it in one event loop at a time.
    """

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        super().__init__(client, config, tokenizer)
        self._stats = StatsLog(lambda: engine_stats(client))
        self._loggers: StatLoggers | None = None

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
        (unless QUIRE_ENABLE_V1_MULTIPROCESSING=0). `stat_loggers`: classes of `api/stat_loggers.py`; they write with
        `do_log_stats`.

        Raises:
            ConfigError, StartupError: as `frontend.startup.start_engine`.
        """
        made = cls.from_config(engine_args.create_engine_config())
        if stat_loggers:
            engines = list(made.client.resolved.config.parallel.ranks)
            made._loggers = StatLoggers(stat_loggers, made.vllm_config, engines)
        return made

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Make one from a configuration; as `from_engine_args`."""
        process = bool(env.get("ENABLE_V1_MULTIPROCESSING"))
        client, tokenizer = start_engine(config, process=process)
        try:
            made = cls(client, config, tokenizer)
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
        sampling_params: RequestParams | None = None,
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
    ) -> AsyncGenerator[Any, None]:
        """One request's outputs as they arrive. Leaving the loop early aborts the request.

        Args:
            request_id: must differ from the ids of all running requests.
            trace_headers, session_id: accepted; they have no effect.
            data_parallel_rank: of the engine that must serve it; None: the least busy one.
            prompt_text: reported as `prompt` when the prompt is given as token ids.
            tenant: the owner of the request: tenants get fair shares, and share no cached prefixes.

        Raises:
            ValidationError: the request is invalid, or its id is in use.
            QueueFull: too many requests wait.
            EngineDeadError: the engine has stopped.
        """
        if hasattr(prompt, "__aiter__"):
            raise Unsupported("a streamed prompt", "pass the whole prompt")
        new_output = asyncio.Event()
        stream = await self.open(
            prompt, sampling_params, request_id, new_output.set, lora_request=lora_request, priority=priority,
            tokenization_kwargs=tokenization_kwargs, prompt_text=prompt_text, arrived=arrival_time,
            tenant=tenant, data_parallel_rank=data_parallel_rank,
        )  # fmt: skip
        with closing(stream):
            while not stream.ended:
                if (output := stream.take()) is not None:
                    yield output
                elif not stream.ended:
                    await new_output.wait()
                    new_output.clear()

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams | None = None, request_id: str = "", **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:  # fmt: skip
        """The output tensor of one prompt, of the task `pooling_params.task`. `options`, errors: as `generate`."""
        async for output in self.generate(prompt, pooling_params or PoolingParams(), request_id, **options):  # fmt: skip
            yield output

    # -- state ----------------------------------------------------------------------------------
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

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLM.add_lora`."""
        return bool(await self.run(added(self.front.adapters, lora_request)))

    async def remove_lora(self, lora_id: int) -> bool:
        """As `LLM.remove_lora`."""
        return bool(await self.run(self.front.adapters.unload_id(lora_id)))

    async def list_loras(self) -> set[int]:
        """As `LLM.list_loras`."""
        return set(await self.run(self.front.adapters.ids()))

    async def pin_lora(self, lora_id: int) -> bool:
        """As `LLM.pin_lora`."""
        return bool(await self.run(self.front.adapters.pin(lora_id)))

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
                    f"{len(self.front.live)} requests are still running after {drain_timeout} s"
                )
            await asyncio.sleep(0.01)

    # -- about the engine -----------------------------------------------------------------------
    async def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        """Raises ValidationError: skip_tokenizer_init=True left the tokenizer out."""
        return self.front.need_tokenizer()

    async def get_model_config(self) -> Any:
        return self.model_config

    async def get_vllm_config(self) -> Any:
        return self.vllm_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        pooling = self.front.pooling
        return ("generate",) if pooling is None else tuple(pooling.info.tasks)

    async def do_log_stats(self) -> None:
        """Write the statistics line now, or let the program's loggers write."""
        await asyncio.to_thread(self._log_stats)

    def _log_stats(self) -> None:
        if self._loggers is None:
            self._stats.tick(self._stats.interval)
            return
        numbers = self.client.resolved.config.parallel.ranks
        engines = zip(numbers, self.client.engines, strict=True)
        self._loggers.log({number: engine_stats(engine) for number, engine in engines})

    async def is_tracing_enabled(self) -> bool:
        return False

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drop cached prefixes. False if running requests use some: these stay, unless `reset_running_requests`
        preempts the requests."""
        return bool(await self.call("reset_prefix_cache", reset_running_requests))

    async def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """As `LLM.collective_rpc`. The worker is in another process unless QUIRE_ENABLE_V1_MULTIPROCESSING=0."""
        return list(await self.call(*worker_call(self.client, method, args, kwargs)))
