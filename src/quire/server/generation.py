"""The generations of one HTTP request: each prompt becomes one engine request, and their outputs one stream.

    engine -> Wakeup.set -> Generation.next -> OutputDeltas

Knows prompts, deltas, times and counts. Does not know answer shapes. However it ends (complete, failed, client
disconnected), it aborts every engine request that still runs. The frontend merges output that nothing has read
yet, so this module needs no bounded queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.client import ERRORS
from quire.errors import Unsupported, ValidationError
from quire.frontend.beam_search import BeamStream
from quire.frontend.outputs import RequestOutput
from quire.frontend.prompts import Prompt
from quire.protocol.sampling_params import BeamSearchParams, SamplingParams
from quire.server.answer_size import check_answer_size
from quire.server.engine_requests import (
    EngineRequests,
    RunningRequest,
    cached_details,
    out_of_time,
)
from quire.server.openai.chat_output import ChatOutputReader
from quire.server.openai.logprobs import Position
from quire.server.openai.sampling_params import FINAL_ONLY
from quire.server.output_delta import OutputDelta
from quire.server.streaming_json import LARGE_ENTRIES
from quire.server.wakeup import Wakeup

if TYPE_CHECKING:
    from quire.server.openai.journal_entry import JournalEntry

KINDS = {"chatcmpl-": "chat_completions", "resp_": "responses"}
"""Prefix of an id -> endpoint, as metrics name it."""


@dataclass(slots=True)
class TokenCount:
    """Token counts of one prompt."""

    prompt_tokens: int
    cached: int = 0
    cached_by_source: dict[str, int] = field(default_factory=dict)
    created: int = 0
    """Tokens that the request wrote to the prefix cache."""
    output_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[Position] | None = None
    resumed: bool = False
    """Another process of the engine went on after the death of the first, and its bits may differ."""


@dataclass(slots=True)
class Generation(EngineRequests):
    """Call `open`, then `next` until `ended`, and `close` in any case."""

    prompts: list[Prompt]
    params: SamplingParams
    reader: ChatOutputReader | None = None
    """Splits reasoning and tool calls from the text."""
    beams: BeamSearchParams | None = None
    """Search for the likeliest outputs instead of sampling."""
    interval: int = 1
    """Tokens to collect for a delta (stream_interval); the first one is not delayed."""
    copies: int = 1
    """Number of choices that repeat their prompt's entries."""
    journal: JournalEntry | None = None
    """Records the engine's outputs, and has the outputs of an earlier process."""
    counts: list[TokenCount] = field(init=False)
    metrics: dict[str, Any] | None = None
    """Of the answer, when its only completion has ended; None: it reports none."""
    ended: bool = False
    _running: list[RunningRequest] = field(default_factory=list)
    _wakeup: Wakeup = field(default_factory=Wakeup)
    _collected: dict[int, OutputDelta] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)
    _at_end: ExitStack = field(default_factory=ExitStack)
    _until: float | None = None
    _by_plugin: asyncio.Future[list[OutputDelta]] | None = None
    """Deltas that a plug-in's code reads."""

    def __post_init__(self) -> None:
        output_tokens = [0] * self.params.n
        self.counts = [
            TokenCount(len(prompt.tokens), output_tokens=output_tokens[:])
            for prompt in self.prompts
        ]

    @property
    def stream(self) -> Any:
        """The engine's outputs of the first prompt; None: it does not run."""
        return self._running[0].stream if self._running else None

    def usage(self, details: bool) -> dict[str, Any]:
        prompt = sum(count.prompt_tokens for count in self.counts)
        output = sum(sum(count.output_tokens) for count in self.counts)
        cached = self.cached()
        cached["created_cache_tokens"] = sum(count.created for count in self.counts)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": cached if details else None,
        }
        if any(count.resumed for count in self.counts):
            usage["resumed"] = True
        if self.reader is not None and self.reader.reading.splits_reasoning:
            details_of_output = {"reasoning_tokens": self.reader.reasoning_tokens}
            usage["completion_tokens_details"] = details_of_output
        return usage

    def cached(self) -> dict[str, Any]:
        by_source = Counter[str]()
        for count in self.counts:
            by_source.update(count.cached_by_source)
        return cached_details(sum(count.cached for count in self.counts), by_source)

    def is_large(self, deltas: Sequence[OutputDelta]) -> bool:
        """Whether to encode the answer in parts."""
        entries = sum(len(delta.tokens) + entries_of(delta.logprobs) for delta in deltas)
        entries += self.copies * sum(entries_of(count.prompt_logprobs) for count in self.counts)
        if self.copies > 1:
            entries += self.copies * sum(len(prompt.tokens) for prompt in self.prompts)
        return entries >= LARGE_ENTRIES

    async def whole(self) -> list[OutputDelta]:
        """All completions, complete, by index."""
        by_index: dict[int, OutputDelta] = {}
        try:
            await self.open()
            while not self.ended:
                for delta in await self.next():
                    if (before := by_index.get(delta.index)) is not None:
                        before.add(delta)
                    else:
                        by_index[delta.index] = delta
        finally:
            self.close()
        return [by_index[index] for index in sorted(by_index)]

    async def open(self) -> None:
        """Send the prompts to the engine.

        Raises:
            ApiError: 400: the answer could be too large.
            ValidationError: the engine cannot serve a prompt.
        """
        limit = self.context.state.config.server.max_answer_entries
        check_answer_size(
            self.prompts, self.params, self.beams, self.context.engine, limit, self.copies
        )
        if self.body.timeout is not None:
            self._until = asyncio.get_running_loop().time() + self.body.timeout
        if (tenant := self.context.tenant) is not None and tenant.name:
            tenant.tokens.take(sum(count.prompt_tokens for count in self.counts))
        self._at_end.callback(self._count_tokens)
        if size := sum(len(item.data) for prompt in self.prompts for item in prompt.media):
            copies = max(self.params.n, self.params.best_of or 1)
            self._at_end.enter_context(self.context.state.media_room.take(copies * size))
        for which in range(len(self.prompts)):
            await self._open_request(which)
            await asyncio.sleep(0)  # let other tasks run between many prompts

    async def next(self) -> list[OutputDelta]:
        """The new deltas, as soon as there are any. It may be cancelled and called again: nothing is lost.

        Raises:
            ApiError: 408 when `timeout` ran out.
            QuireError: a request failed.
        """
        deltas: list[OutputDelta] = []
        while not (deltas or self.ended):
            if self._by_plugin is None:
                if self.journal is not None and self.journal.waits and self._running:
                    await self.journal.replay(self.context.engine, self.stream)
                elif self._until is None:
                    await self._wakeup.wait()
                else:
                    await self._in_time(self._until)
                for running in tuple(self._running):
                    deltas += self._take(running)
            if self.reader is not None:
                deltas = await self._read(self.reader, deltas)
            if self.interval != 1:
                deltas = list(self._in_intervals(deltas))
            self.ended = not self._running
        return deltas

    async def _read(self, reader: ChatOutputReader, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Split the deltas' texts: in a thread if that runs a plug-in's code; if `next` is cancelled then, the next call goes on."""

        def read() -> list[OutputDelta]:
            for delta in deltas:
                reader.read(delta)
                self._count_calls(reader, delta)
            return deltas

        if not reader.runs_code:
            return read()
        if self._by_plugin is None and deltas:
            self._by_plugin = asyncio.ensure_future(self.context.state.plugin_calls.run(read))
        if self._by_plugin is None:
            return deltas
        found = await asyncio.shield(self._by_plugin)
        self._by_plugin = None
        return found

    def close(self) -> None:
        """Abort the requests that still run."""
        for running in tuple(self._running):
            self._end(running)
        if self._by_plugin is not None:
            self._by_plugin.cancel()
            if self._by_plugin.done() and not self._by_plugin.cancelled():
                self._by_plugin.exception()  # nobody has taken it
        self._at_end.close()

    async def _in_time(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._wakeup.wait()
        except TimeoutError as error:
            raise out_of_time(self.body.timeout) from error

    def _take(self, running: RunningRequest) -> list[OutputDelta]:
        """The new deltas of one prompt."""
        output, ended = self.take(running), running.stream is not None and running.stream.ended
        if output is None:
            if ended:
                self._end(running)
            return []
        if self.journal is not None:
            self.journal.taken()
        running.times = getattr(output, "metrics", None)
        running.timer.engine = getattr(running.times, "engine", 0)
        running.timer.output(whole=self.params.output_kind == FINAL_ONLY)
        if output.finished and output.outputs and len(self.prompts) == self.params.n == 1:
            self._note_metrics(output)
        deltas = output_deltas(output, running.which, self.params.n, self.counts[running.which])
        if ended:
            self._end(running)
        return deltas

    def _note_metrics(self, output: RequestOutput) -> None:
        """What features say of the only completion."""
        answers, metrics = output.outputs[0].details, dict[str, Any]()
        for feature in self.context.engine.front.features:
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

    def _count_tokens(self) -> None:
        """Count them for the key's limits and in the metrics, however the generation ends."""
        tenant, adapter, metrics = self.context.tenant, self.context.adapter, self.context.state.metrics  # fmt: skip
        prompt = sum(count.prompt_tokens for count in self.counts)
        output = sum(sum(count.output_tokens) for count in self.counts)
        if tenant is not None and tenant.name:
            tenant.tokens.take(output)
            metrics.by_key(tenant.name, prompt, output)
        if adapter is not None:
            metrics.by_adapter(adapter, prompt, output)

    async def _open_request(self, which: int) -> None:
        state, engine, prompt = self.context.state, self.context.engine, self.prompts[which]
        running = self.begin(which, len(self.prompts), prompt, self.params)
        self._running.append(running)
        name, wake = running.name, self._wakeup.set
        options = self.context.engine_options(self.body)
        if self.journal is not None:
            options |= {"tap": self.journal.tap, "waits": self.journal.waits}
        if self.beams is None:
            try:
                running.stream = await engine.open(prompt, self.params, name, wake, **options)
            except Unsupported as error:
                raise ValidationError(str(error)) from error
            return
        open_step = partial(engine.open, is_subrequest=True, arrived=time.time(), **options)
        running.stream = state.searches[name] = BeamStream(
            engine.inputs, prompt, self.beams, name, open_step, partial(engine.call, "count_ended"), wake,
            logprobs=self.params.logprobs is not None,
        )  # fmt: skip

    def _end(self, running: RunningRequest) -> None:
        self._running.remove(running)
        self.context.state.searches.pop(running.name, None)
        count, params = self.counts[running.which], self.params
        self.end(running, count.cached, count.output_tokens, n=params.n, max_tokens=params.max_tokens)  # fmt: skip

    def _count_calls(self, reader: ChatOutputReader, delta: OutputDelta) -> None:
        if delta.finish_reason is not None and reader.reading.tools.parameters:
            called = bool(reader.outputs[delta.index].parser.num_calls)
            kind = next((kind for start, kind in KINDS.items() if self.id.startswith(start)), "other")  # fmt: skip
            streamed = self.params.output_kind != FINAL_ONLY
            self.context.state.metrics.read_for_calls(streamed, called, kind)


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
    if output.num_cached_tokens:
        count.cached = output.num_cached_tokens
        count.cached_by_source = output.cached_tokens_by_source or {}
    count.resumed |= bool(getattr(getattr(output, "metrics", None), "resumed", False))
    count.created = output.num_cache_creation_tokens or count.created
    if output.prompt_logprobs is not None:
        count.prompt_logprobs = output.prompt_logprobs
    deltas = []
    for one in output.outputs:
        if one.finish_reason == "error":
            raise ERRORS[one.error_kind](f"request {output.request_id}: {one.error}")
        count.output_tokens[one.index] += len(one.token_ids)
        place = which * n + one.index
        deltas.append(
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
    return deltas
