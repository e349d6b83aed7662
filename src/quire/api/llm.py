"""LLM: a model in this program. Takes prompts and returns all outputs, in order, when they are done.

The engine runs in this process, in the thread that waits for outputs: no `__main__` guard is needed. For streams
and for many concurrent callers there is AsyncLLM.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

from quire.api.collective_rpc import worker_call
from quire.api.lora_calls import LoraCalls
from quire.api.media_calls import MediaCalls
from quire.api.metrics import Metric, MetricsWatch
from quire.api.pooling import PoolingMethods
from quire.api.profiler_calls import ProfilerCalls
from quire.api.progress import Progress, progress
from quire.api.prompt_batch import BatchOptions, Params, accept_all, forgotten_on_failure, spread
from quire.api.unsupported import UnsupportedMethods
from quire.api.vllm_config_view import EngineFacts
from quire.config.engine import EngineConfig
from quire.config.from_keywords import engine_config
from quire.engine import sleep, sleep_client
from quire.engine.client import EngineClient
from quire.errors import InternalError, QuireError, ValidationError
from quire.frontend.adapters import names_for
from quire.frontend.beam_search import search_together
from quire.frontend.chat import ChatOptions, conversations
from quire.frontend.input_processor import AcceptedRequest
from quire.frontend.outputs import BeamSearchOutput, RequestOutput, error_of
from quire.frontend.prompts import read_prompts
from quire.frontend.request_manager import RequestManager
from quire.frontend.startup import start_engine
from quire.frontend.tokenizer import Tokenizer
from quire.logging import configure, get_logger
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams

log = get_logger(__name__)


class LLM(PoolingMethods, EngineFacts, LoraCalls, MediaCalls, ProfilerCalls, UnsupportedMethods):
    """`LLM("quire-tiny").generate(["Once upon a time"], SamplingParams(max_tokens=20))`

    Args:
        model: a directory, a hub id, or the name of an embedded model.
        keywords: any flag of `quire serve` except the HTTP server's own, with underscores.

    Raises:
        TypeError: an unknown keyword.
        ConfigError: values that do not fit together, or no such model.
        NotEnoughMemory: weights and a cache do not fit; the message has the numbers.
        Unsupported: a feature that is not implemented yet.
    """

    def __init__(self, model: str = "quire-tiny", **keywords: Any):
        keywords.setdefault("disable_log_stats", True)
        self._start(engine_config({"model": model, **keywords}))

    @classmethod
    def from_engine_args(cls, args: Any) -> Self:
        """Make one from an EngineArgs."""
        return cls.from_config(args.create_engine_config())

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Make one from a configuration, without changes."""
        (made := cls.__new__(cls))._start(config)
        return made

    @classmethod
    def from_client(cls, client: EngineClient) -> Self:
        """Make one on a running engine."""
        made = cls.__new__(cls)
        made._attach(client)
        return made

    def _start(self, config: EngineConfig) -> None:
        configure("llm", config.observe.log_level, force=False)
        client, tokenizer = start_engine(config)
        try:
            self._attach(client, tokenizer)
        except BaseException:
            client.close()
            raise

    def _attach(self, client: EngineClient, tokenizer: Tokenizer | None = None) -> None:
        self.client = client
        self.config = client.resolved.config
        self.front = RequestManager(client, tokenizer=tokenizer)
        self.front.logs_requests = self.config.observe.enable_log_requests
        self.watch = MetricsWatch(client, self.config.model.model)
        self.request_counter = itertools.count()
        self._running = threading.RLock()  # its owner drives the engine, others wait
        self._uncollected: dict[str, Any] = {}
        self._asleep = False
        self._close = weakref.finalize(self, client.close)

    # -- generation -----------------------------------------------------------------------------
    def generate(
        self, prompts: Any = None, sampling_params: Params = None, *, use_tqdm: Progress = True,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput]:  # fmt: skip
        """Generate outputs for one prompt or several, in the order of the prompts.

        Args:
            prompts: text, token ids, a dict (`prompt` or `prompt_token_ids`), or a list of these.
            sampling_params: one for all, or one for each; None: the model's defaults.
            use_tqdm: show progress; a callable makes the bar.
            lora_request: a LoRARequest, or the name of a loaded adapter, one for all or one for each; None: the model itself.
            priority: lower runs sooner, one for all or one for each (scheduling_policy="priority").
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens.

        If the engine fails on a single request, its finish_reason is "error", and `error` has the reason.

        Raises:
            ValidationError: an invalid prompt or parameter. Most are found before anything is generated; a logits
                processor, or a grammar, may refuse a request later.
            ProcessorFailed: a logits processor raised an exception.
            EngineDeadError: the engine has stopped.
        """
        return self.run_accepted(self._accept(prompts, sampling_params, **options), use_tqdm)

    def chat(
        self, messages: Any, sampling_params: Params = None, use_tqdm: Progress = True,
        lora_request: Any = None, **options: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation (a list of messages), or several.

        Args:
            options: chat_template, chat_template_content_format, add_generation_prompt,
                continue_final_message, tools, documents, chat_template_kwargs.
            All others: as `generate`.

        Raises:
            ValidationError: as `generate`; also messages that the chat template rejects.
        """
        options["lora_request"] = lora_request
        return self.run_accepted(self._accept_chat(messages, sampling_params, **options), use_tqdm)

    def enqueue(
        self, prompts: Any, sampling_params: Params = None, *, use_tqdm: Progress = True,
        **options: Unpack[BatchOptions],
    ) -> list[str]:  # fmt: skip
        """As `generate`, but only sends the requests and returns their ids; see `wait_for_completion`."""
        return self._submit(self._accept(prompts, sampling_params, **options))

    def enqueue_chat(
        self, messages: Any, sampling_params: Params = None, *, use_tqdm: Progress = True,
        **options: Any,
    ) -> list[str]:  # fmt: skip
        """As `chat`, but only sends the requests and returns their ids."""
        return self._submit(self._accept_chat(messages, sampling_params, **options))

    def wait_for_completion(
        self, request_ids: Sequence[str] | None = None, *, use_tqdm: Progress = True
    ) -> list[RequestOutput]:
        """Outputs of enqueued requests (these ids, or all), in the order of enqueuing.

        Raises:
            ValidationError: an id that was not enqueued, or whose output was already fetched.
            Others: as `generate`; the other outputs can still be fetched.
        """
        with self._running:
            ids = (
                list(request_ids)
                if request_ids is not None
                else [*self._uncollected, *self.front.live]
            )
            ids.sort(key=lambda id: (len(id), id))
            for id in ids:
                if id not in self._uncollected and id not in self.front.live:
                    raise ValidationError(
                        f"request {id!r} was never enqueued, or its output was already fetched",
                        parameter="request_ids", value=id,
                    )  # fmt: skip
            return self._wait(ids, use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, lora_request: Any = None,
        use_tqdm: Progress = False, concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """For each prompt, the likeliest texts that a beam search with `params.beam_width` beams finds.

        Args:
            concurrency_limit: prompts to search at a time; None: all.

        Raises:
            ValidationError: as `generate`.
        """
        self.front.need_generation("LLM.beam_search")
        given, outputs = read_prompts(prompts), []
        adapters = names_for(self.front.adapters, spread("lora_request", lora_request, len(given)))
        at_once = concurrency_limit or len(given) or 1
        with progress(use_tqdm, len(given), "Beam search") as bar:
            for start in range(0, len(given), at_once):
                began, some = time.monotonic(), given[start : start + at_once]
                ids = map(str, self.request_counter)
                loras = adapters[start : start + at_once]
                for one in search_together(self.front.inputs, some, params, self.run_accepted, ids, loras):  # fmt: skip
                    result = BeamSearchOutput(one.best(self.tokenizer))
                    self.watch.searched(began, len(one.prompt), result, params.max_tokens)
                    outputs.append(result)
                bar.update(len(some))
        return outputs

    # -- requests -------------------------------------------------------------------------------
    def _accept(
        self, prompts: Any, params: Params, **options: Unpack[BatchOptions]
    ) -> list[AcceptedRequest]:
        return accept_all(self.front, map(str, self.request_counter), prompts, params, **options)

    def _accept_chat(
        self, messages: Any, params: Params, *,
        tokenization_kwargs: Mapping[str, Any] | None = None, mm_processor_kwargs: Any = None, **options: Any,
    ) -> list[AcceptedRequest]:  # fmt: skip
        self.front.need_generation("LLM.chat")
        how = ChatOptions.of_keywords(options)
        prompts = [self.front.chat_prompt(one, how, mm_processor_kwargs) for one in conversations(messages)]  # fmt: skip
        tokenization = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._accept(prompts, params, tokenization_kwargs=tokenization, **options)

    def _submit(self, accepted: Sequence[AcceptedRequest]) -> list[str]:
        with self._running:
            for one in accepted:
                self.front.submit(one)
        return [one.id for one in accepted]

    def run_accepted(
        self, accepted: Sequence[AcceptedRequest], use_tqdm: Progress = False
    ) -> list[RequestOutput]:
        """Send requests and wait for them. After an error nothing of these requests remains."""
        with self._running:
            ids = [one.id for one in accepted]
            with forgotten_on_failure(self.front, ids, self._uncollected):
                self._submit(accepted)
                return self._wait(ids, use_tqdm)

    def _wait(self, ids: Sequence[str], use_tqdm: Progress) -> list[RequestOutput]:
        """Drive the engine until these requests are finished."""
        open_ones = {id for id in ids if id not in self._uncollected}
        if open_ones and self._asleep:
            raise QuireError(
                "the engine is asleep, so these requests would never finish; call wake_up() first"
            )
        with progress(use_tqdm, len(ids)) as bar:
            bar.update(len(ids) - len(open_ones))
            while open_ones:
                for output in self._turn():
                    if output.request_id in open_ones:
                        open_ones.remove(output.request_id)
                        bar.count(output)
        for id in ids:
            error = error_of(self._uncollected[id])
            if error is not None and type(error) is not InternalError:
                del self._uncollected[id]
                raise error
        return [self._uncollected.pop(id) for id in ids]

    def _turn(self) -> Iterator[Any]:
        """Requests that finished in the engine's next outputs."""
        for collector in self.front.process_outputs(self.client.outputs()):
            output: Any = collector.take()
            if output is None or not output.finished:
                continue
            self._uncollected[output.request_id] = output
            if not collector.accepted.is_subrequest:
                self.watch.finished(output, collector.params)
            for one in output.parts:
                if one.finish_reason == "error":
                    log.error("request %s failed: %s", output.request_id, one.error)
            yield output
        self.watch.tick()

    # -- about the engine -----------------------------------------------------------------------
    @property
    def llm_engine(self) -> LLM:
        """This object: programs read `tokenizer`, `model_config` and other attributes of `llm_engine`."""
        return self

    def get_num_unfinished_requests(self) -> int:
        """Requests that are enqueued or run."""
        return len(self.front.live)

    def has_unfinished_requests(self) -> bool:
        return bool(self.front.live)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front.tokenizer

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",) if self.front.pooling is None else tuple(self.front.pooling.info.tasks)

    @property
    def chat_template(self) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.chat_template

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The values of the model's generation config, by the names of SamplingParams."""
        return dict(self.front.inputs.defaults.sampling)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.front.inputs.defaults.params()

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValidationError: skip_tokenizer_init=True left the tokenizer out."""
        return self.front.need_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks of all engines; without `include_dp` of one."""
        parallel = self.config.parallel
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """The series of /metrics, as objects with name, labels and value."""
        return self.watch.read()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drop cached prefixes. False if running requests use some: these stay, unless `reset_running_requests`
        preempts the requests."""
        return bool(self.client.call("reset_prefix_cache", reset_running_requests))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by its name, or `method(worker, *args, **kwargs)`; returns one result per worker.

        Raises:
            Unsupported: a function, or the method get_model, for a worker in another process.
            ValidationError: no method of this name.
            QuireError: the method failed.
        """
        message = worker_call(self.client, method, args, kwargs)
        try:
            return list(self.client.call(*message))
        except QuireError:
            self._asleep = bool(self.client.call("is_sleeping"))  # reload_weights may have failed
            raise

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` of every worker.

        Raises:
            Unsupported: the worker is in another process (distributed_executor_backend="mp").
        """
        return self.collective_rpc("apply_model", args=[func])

    # -- sleep ----------------------------------------------------------------------------------
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`. Nothing can be generated meanwhile, and the prefix cache is emptied.

        Args:
            level: 1 frees the KV cache; 2 also the weights, which are loaded again later; 0 frees nothing.
            mode: what happens to requests that other threads run or that were enqueued: abort; wait (until they
                are done); keep (they continue after `wake_up`, with the same tokens).

        Raises:
            ValidationError: an unknown level or mode.
            Conflict: another thread woke the engine up before all requests had ended.
        """
        sleep.checked_level(level)
        sleep.checked_mode(mode)
        call = self.client.call
        self._asleep = True  # first, so that a later caller fails instead of waiting with the lock
        try:
            with sleep_client.holding_inline(call, mode, sleep.SLEEP) as holder:
                if mode != "keep":
                    # Other threads end their own requests; enqueued requests end here.
                    with self._running:
                        while self.front.live:
                            for _ in self._turn():
                                pass
                sleep_client.check_held(call("sleep", level, holder))
        except BaseException:
            self._asleep = bool(call("is_sleeping"))
            raise

    def release_kv_cache_memory(self) -> None:
        """Free only the KV cache, after `sleep(level=0)` and until `wake_up(["kv_cache"])`.

        Raises:
            Conflict: the engine is running, or has already freed memory.
        """
        sleep_client.check_released(self.client.call("release_kv_cache"))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore what `sleep` freed: weights, kv_cache, scheduling, or (None) all. Returns whether it is awake now.

        Raises:
            ValidationError: an unknown tag.
            QuireError: the weights could not be loaded again; the engine still sleeps.
        """
        self._asleep = bool(self.client.call("wake_up", list(sleep.checked_tags(tags))))
        return not self._asleep

    def is_sleeping(self) -> bool:
        return self._asleep

    def shutdown(self) -> None:
        """Stop the engine and free its memory. Garbage collection of this object does the same."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.shutdown()
