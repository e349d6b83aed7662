"""The generations of one HTTP request: each prompt becomes one engine request, and their outputs one stream.

    engine -> Wakeup.set -> Generation.next -> OutputDeltas

Knows prompts, deltas, times and counts. Does not know answer shapes. However it ends (complete, failed, client
disconnected), it aborts every engine request that still runs. The frontend merges output that nothing has read
yet, so this module needs no bounded queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.api.async_engine import AsyncEngine, OutputStream
from quire.engine.client import ERRORS
from quire.errors import Unsupported, ValidationError
from quire.frontend.beam_search import BeamStream
from quire.frontend.outputs import RequestOutput
from quire.frontend.prompts import Prompt
from quire.observe.request_metrics import RequestTimer
from quire.observe.tracing import SpanAttributes
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams
from quire.server.answer_size import check_answer_size
from quire.server.api_keys import Tenant
from quire.server.engine_requests import Wakeup, log_request, new_output, out_of_time, prompt_ids
from quire.server.openai.chat_output import ChatOutputReader
from quire.server.openai.logprobs import Position
from quire.server.openai.sampling_params import FINAL_ONLY
from quire.server.output_delta import OutputDelta
from quire.server.state import ServerState
from quire.server.streaming_json import LARGE_ENTRIES

KINDS = {"chatcmpl-": "chat_completions", "resp_": "responses"}
"""Prefix of an id -> endpoint, as metrics name it."""


@dataclass(slots=True)
class TokenCount:
    """Token counts of one prompt."""

    prompt_tokens: int
    cached: int = 0
    created: int = 0
    """Those that the request wrote to the prefix cache."""
    output_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[Position] | None = None


@dataclass(slots=True)
class RunningPrompt:
    """The engine request of a prompt."""

    which: int
    name: str
    """Its id in the engine."""
    public_id: str
    """Its id for the user."""
    params: SamplingParams
    stream: OutputStream | BeamStream
    timer: RequestTimer
    times: Any = None
    """The frontend's RequestMetrics, if any."""


@dataclass(slots=True)
class Generation:
    """Call `open`, then `next` until `ended`, and `close` in any case."""

    state: ServerState
    engine: AsyncEngine
    id: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    interval: int = 1
    """Tokens to collect for a delta (stream_interval); the first one is not delayed."""
    tenant: Tenant | None = None
    reader: ChatOutputReader | None = None
    """Splits reasoning and tool calls from the text."""
    beams: BeamSearchParams | None = None
    """Search for the likeliest outputs instead of sampling."""
    adapter: str | None = None
    """The LoRA adapter that the request names as its model."""
    copies: int = 1
    """Number of choices that repeat their prompt's entries."""
    data_parallel_rank: int | None = None
    """The engine that must serve the request; None: any."""
    counts: list[TokenCount] = field(init=False)
    metrics: dict[str, Any] | None = None
    """Of the answer, when its only completion has ended; None: it reports none."""
    ended: bool = False
    _running: list[RunningPrompt] = field(default_factory=list)
    _wakeup: Wakeup = field(default_factory=Wakeup)
    _collected: dict[int, OutputDelta] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)
    _counted: ExitStack = field(default_factory=ExitStack)
    _until: float | None = None

    def __post_init__(self) -> None:
        n = self.params.n
        limit = self.state.config.server.max_answer_entries
        check_answer_size(self.prompts, self.params, self.beams, self.engine, limit, self.copies)
        self.counts = [TokenCount(len(p.tokens), output_tokens=[0] * n) for p in self.prompts]

    def usage(self, details: bool) -> dict[str, Any]:
        prompt = sum(count.prompt_tokens for count in self.counts)
        output = sum(sum(count.output_tokens) for count in self.counts)
        cached = {
            "cached_tokens": sum(count.cached for count in self.counts),
            "created_cache_tokens": sum(count.created for count in self.counts),
        }
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": cached if details else None,
        }
        if self.reader is not None and self.reader.reading.splits_reasoning:
            details_of_output = {"reasoning_tokens": self.reader.reasoning_tokens}
            found["completion_tokens_details"] = details_of_output
        return found

    def is_large(self, deltas: Sequence[OutputDelta]) -> bool:
        """Whether to encode the answer in parts."""
        entries = sum(len(delta.tokens) + entries_of(delta.logprobs) for delta in deltas)
        entries += self.copies * sum(entries_of(count.prompt_logprobs) for count in self.counts)
        if self.copies > 1:
            entries += self.copies * sum(len(prompt.tokens) for prompt in self.prompts)
        return entries >= LARGE_ENTRIES

    async def whole(self) -> list[OutputDelta]:
        """All completions, complete, by index."""
        found: dict[int, OutputDelta] = {}
        try:
            await self.open()
            while not self.ended:
                for delta in await self.next():
                    if (before := found.get(delta.index)) is not None:
                        before.add(delta)
                    else:
                        found[delta.index] = delta
        finally:
            self.close()
        return [found[index] for index in sorted(found)]

    async def open(self) -> None:
        """Send the prompts to the engine.

        Raises:
            ValidationError: the engine cannot serve a prompt.
        """
        if self.timeout is not None:
            self._until = asyncio.get_running_loop().time() + self.timeout
        if self.tenant is not None and self.tenant.name:
            self._counted.enter_context(self._counting(self.tenant))
        if self.adapter is not None:
            self._counted.callback(self._count_adapter, self.adapter)
        if size := sum(len(item.data) for prompt in self.prompts for item in prompt.media):
            copies = max(self.params.n, self.params.best_of or 1)
            self._counted.enter_context(self.state.media_room.take(copies * size))
        for which in range(len(self.prompts)):
            self._running.append(await self._open_request(which))
            await asyncio.sleep(0)  # let other tasks run between many prompts

    async def next(self) -> list[OutputDelta]:
        """The new deltas, as soon as there are any. It may be cancelled and called again: nothing is lost.

        Raises:
            ApiError: 408 when `timeout` ran out.
            QuireError: a request failed.
        """
        deltas: list[OutputDelta] = []
        while not (deltas or self.ended):
            if self._until is None:
                await self._wakeup.wait()
            else:
                await self._in_time(self._until)
            for running in tuple(self._running):
                deltas += self._take(running)
            self.ended = not self._running
        return deltas

    def close(self) -> None:
        """Abort the requests that still run."""
        for running in tuple(self._running):
            self._end(running)
        self._counted.close()

    async def _in_time(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._wakeup.wait()
        except TimeoutError as error:
            raise out_of_time(self.timeout) from error

    def _take(self, running: RunningPrompt) -> list[OutputDelta]:
        """The new deltas of one prompt."""
        if (output := new_output(running.stream, self.state, self.adapter)) is None:
            if running.stream.ended:
                self._end(running)
            return []
        running.times = getattr(output, "metrics", None)
        running.timer.engine = getattr(running.times, "engine", 0)
        running.timer.output(whole=running.params.output_kind == FINAL_ONLY)
        if output.finished and len(self.prompts) == self.params.n == 1:
            self._note_metrics(output)
        deltas = output_deltas(output, running.which, self.params.n, self.counts[running.which])
        if self.reader is not None:
            for delta in deltas:
                self.reader.read(delta)
                self._count_calls(self.reader, delta, running.params)
        if running.stream.ended:
            self._end(running)
        return deltas if self.interval == 1 else list(self._in_intervals(deltas))

    def _note_metrics(self, output: RequestOutput) -> None:
        """What features say of the only completion."""
        answers, metrics = output.outputs[0].details, dict[str, Any]()
        for feature in self.engine.front.features:
            metrics |= feature.usage(answers.get(feature.name))
        self.metrics = metrics or None

    def _in_intervals(self, deltas: list[OutputDelta]) -> Iterator[OutputDelta]:
        for delta in deltas:
            if (before := self._collected.pop(delta.index, None)) is not None:
                before.add(delta)
                delta = before
            first = delta.index not in self._started and bool(delta.tokens)
            if not (first or delta.finish_reason) and len(delta.tokens) < self.interval:
                self._collected[delta.index] = delta
            else:
                self._started.add(delta.index)
                yield delta

    @contextmanager
    def _counting(self, tenant: Tenant) -> Iterator[None]:
        """Count the tokens for the tenant's limits and metrics, however the generation ends."""
        metrics = self.state.metrics
        prompt = sum(count.prompt_tokens for count in self.counts)
        tenant.tokens.take(prompt)
        try:
            yield
        finally:
            output = sum(sum(count.output_tokens) for count in self.counts)
            tenant.tokens.take(output)
            metrics.by_key(tenant.name, prompt, output)

    def _count_adapter(self, adapter: str) -> None:
        prompt = sum(count.prompt_tokens for count in self.counts)
        output = sum(sum(count.output_tokens) for count in self.counts)
        self.state.metrics.by_adapter(adapter, prompt, output)

    async def _open_request(self, which: int) -> RunningPrompt:
        prompt = self.prompts[which]
        public_id, name = prompt_ids(self.state, self.id, which, len(self.prompts))
        timer = RequestTimer(self.state.metrics)
        # A copy: the frontend fills in this request's own values (seed, EOS tokens).
        params = self.params.settled() if len(self.prompts) > 1 else self.params
        log_request(self.state, public_id, prompt, params)
        tenant = self.tenant.id if self.tenant is not None else ""
        self.state.active.add(name)
        try:
            stream = await self._stream(prompt, params, name, tenant)
        except BaseException:
            self.state.active.discard(name)
            raise
        return RunningPrompt(which, name, public_id, params, stream, timer)

    async def _stream(
        self, prompt: Prompt, params: SamplingParams, name: str, tenant: str
    ) -> OutputStream | BeamStream:
        engine = self.engine
        open_request = partial(engine.open, priority=self.priority, tenant=tenant)
        if self.data_parallel_rank is not None:
            open_request = partial(open_request, data_parallel_rank=self.data_parallel_rank)
        if self.adapter is not None:
            open_request = partial(open_request, adapter=self.adapter)
        if self.beams is None:
            try:
                return await open_request(prompt, params, name, self._wakeup.set)
            except Unsupported as error:
                raise ValidationError(str(error)) from error
        search = self.state.searches[name] = BeamStream(
            engine.inputs, prompt, self.beams, name, partial(open_request, is_subrequest=True, arrived=time.time()),
            partial(engine.call, "count_ended"), self._wakeup.set, logprobs=params.logprobs is not None,
        )  # fmt: skip
        return search

    def _end(self, running: RunningPrompt) -> None:
        """Remove a request that has ended or is no longer needed, and record its metrics."""
        self._running.remove(running)
        self.state.active.discard(running.name)
        self.state.searches.pop(running.name, None)
        running.stream.close()
        count, params = self.counts[running.which], running.params
        latencies = running.timer.end(
            prompt_tokens=count.prompt_tokens,
            cached=count.cached,
            output_tokens=count.output_tokens,
            max_tokens=params.max_tokens,
            n=self.params.n,
            times=running.times,
        )
        if (tracer := self.state.tracer) is not None:
            model, made = self.state.model_name, count.output_tokens
            tracer.request(
                SpanAttributes(running.public_id, model, params, count.prompt_tokens, made),
                latencies,
            )

    def _count_calls(
        self, reader: ChatOutputReader, delta: OutputDelta, params: SamplingParams
    ) -> None:
        if delta.finish_reason is not None and reader.reading.tools.parameters:
            called = bool(reader.outputs[delta.index].parser.num_calls)
            kind = next((kind for start, kind in KINDS.items() if self.id.startswith(start)), "other")  # fmt: skip
            streamed = params.output_kind != FINAL_ONLY
            self.state.metrics.read_for_calls(streamed, called, kind)


def entries_of(positions: Sequence[Position] | None) -> int:
    """Number of log-probabilities of an output or a prompt."""
    if positions is None:
        return 0
    packed = getattr(positions, "entries", None)
    return sum(len(one or ()) for one in positions) if packed is None else packed


def output_deltas(
    output: RequestOutput, which: int, n: int, count: TokenCount
) -> list[OutputDelta]:
    """The deltas of an output; its prompt's data goes into `count`."""
    count.cached = output.num_cached_tokens or count.cached
    count.created = output.num_cache_creation_tokens or count.created
    if output.prompt_logprobs is not None:
        count.prompt_logprobs = output.prompt_logprobs
    found = []
    for one in output.outputs:
        if one.finish_reason == "error":
            raise ERRORS[one.error_kind](f"request {output.request_id}: {one.error}")
        count.output_tokens[one.index] += len(one.token_ids)
        place = which * n + one.index
        found.append(
            OutputDelta(
                which,
                place,
                one.text,
                one.token_ids,
                one.logprobs,
                one.finish_reason,
                one.stop_reason,
            )
        )
    return found
