"""One HTTP request's generations: a prompt or several, each one request of the engine, merged into one stream.

Knows prompts, deltas, times and counts. Does not know the shape of any answer. However it ends (in full, by
an error, by a client who hangs up), every request of the engine that still runs is aborted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.errors import QueueFull
from quire.frontend.outputs import ERRORS
from quire.frontend.parsers.engine import CallDelta
from quire.logging import get_logger
from quire.observe.requests import RequestTimer
from quire.observe.trace import Asked
from quire.protocol.params import SamplingParams
from quire.server.engine import OutputLike, Prompt, TextEngine
from quire.server.errors import ApiError, invalid
from quire.server.logprobs import Position
from quire.server.reading import Reader, added
from quire.server.sampling import FINAL_ONLY
from quire.server.sse import ended
from quire.server.state import ServerState
from quire.server.tenants import Tenant

log = get_logger(__name__)

REQUESTS, TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"
KINDS = {"chatcmpl-": "chat_completions", "resp_": "responses"}
"""What an id begins with -> what was asked for, as metrics have it."""

MAX_BUFFERED = 256  # outputs of several prompts that wait to be written


@dataclass(slots=True)
class Delta:
    """What is new of one completion; merged with others, all of it."""

    prompt: int
    index: int
    """Prompt-major over all completions of the HTTP request."""
    text: str
    tokens: list[int]
    logprobs: list[Position] | None
    finish_reason: str | None
    stop_reason: int | str | None
    reasoning: str = ""
    """Thoughts, which are not in `text`."""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        self.calls = added(self.calls, later.calls)
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class Count:
    """What one prompt has come to."""

    prompt_tokens: int
    cached: int = 0
    output_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[Position] | None = None


@dataclass(slots=True)
class Generation:
    state: ServerState
    engine: TextEngine
    id: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    interval: int = 1
    """Tokens that are collected before they are told (stream_interval)."""
    tenant: Tenant | None = None
    reader: Reader | None = None
    """Tells thoughts and tool calls from the text."""
    counts: list[Count] = field(init=False)

    def __post_init__(self) -> None:
        n = self.params.n
        each = max(n, self.params.best_of or 1)
        most = self.state.config.server.max_completions
        if (total := len(self.prompts) * each) > most:
            raise invalid(
                f"{len(self.prompts)} prompts with `n` = {each} make {total} completions; this server takes"
                f" at most {most} in one request (--max-completions)",
                "n",
            )
        self.counts = [Count(len(p.tokens), output_tokens=[0] * n) for p in self.prompts]

    def usage(self, details: bool) -> dict[str, Any]:
        prompt = sum(count.prompt_tokens for count in self.counts)
        output = sum(sum(count.output_tokens) for count in self.counts)
        cached = {"cached_tokens": sum(count.cached for count in self.counts)}
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": cached if details else None,
        }
        if self.reader is not None and self.reader.reading.reasons:
            told = {"reasoning_tokens": self.reader.reasoning_tokens}
            found["completion_tokens_details"] = told
        return found

    async def whole(self) -> list[Delta]:
        """All completions, complete, by index."""
        found: dict[int, Delta] = {}
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                if (before := found.get(delta.index)) is not None:
                    before.add(delta)
                else:
                    found[delta.index] = delta
        return [found[index] for index in sorted(found)]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes.

        Raises:
            ApiError: a request failed; 408 when `timeout` ran out.
        """
        end = None if self.timeout is None else time.monotonic() + self.timeout
        async with aclosing(self._collected()) as deltas, self._counted():
            while True:
                try:
                    if end is None:
                        delta = await anext(deltas)
                    else:
                        left = end - time.monotonic()
                        delta = await asyncio.wait_for(anext(deltas), max(left, 0))
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    if end is None:
                        raise  # another's patience, not this request's
                    raise ApiError(
                        408, f"the request was not done in {self.timeout:g} s", param="timeout"
                    ) from error
                except QueueFull as error:
                    self.state.metrics.refused(TOKENS if TOKENS in str(error) else REQUESTS)
                    raise
                yield delta

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """What it costs is counted for its tenant, however it ends."""
        tenant, metrics = self.tenant, self.state.metrics
        if tenant is None or not tenant.name:
            yield
            return
        prompt = sum(count.prompt_tokens for count in self.counts)
        try:
            with tenant.asking(prompt):
                try:
                    yield
                finally:
                    output = sum(sum(count.output_tokens) for count in self.counts)
                    tenant.tokens.take(output)
                    metrics.by_key(tenant.name, prompt, output)
        except ApiError as error:
            if error.status == 429:
                metrics.key_refused(tenant.name)
            raise

    async def _collected(self) -> AsyncGenerator[Delta, None]:
        waiting: dict[int, Delta] = {}
        async with aclosing(self._merged()) as deltas:
            async for delta in deltas:
                if (before := waiting.pop(delta.index, None)) is not None:
                    before.add(delta)
                    delta = before
                if delta.finish_reason is None and len(delta.tokens) < self.interval:
                    waiting[delta.index] = delta
                else:
                    yield delta

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        if len(self.prompts) == 1:
            async with aclosing(self._one(0)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        # Bounded: an engine that is faster than the client waits for it here.
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(MAX_BUFFERED)
        tasks = [
            asyncio.ensure_future(self._into(queue, which)) for which in range(len(self.prompts))
        ]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            await ended(*tasks)

    async def _into(self, queue: asyncio.Queue[Delta | BaseException | None], which: int) -> None:
        try:
            async with aclosing(self._one(which)) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def _one(self, which: int) -> AsyncGenerator[Delta, None]:
        prompt, count, n = self.prompts[which], self.counts[which], self.params.n
        name = told = self.id if len(self.prompts) == 1 else f"{self.id}-{which}"
        if self.state.fronts > 1:  # the other processes' clients choose ids too
            name = shared_name(name, self.state.front)
        if name in self.state.active:  # clients choose ids, and may choose one twice
            name = f"{name}-{secrets.token_hex(4)}"
        timer = RequestTimer(self.state.metrics)
        # A copy: the rooms below fill in what is this request's own (seed, ends of text).
        params = msgspec.structs.replace(self.params) if len(self.prompts) > 1 else self.params
        self.state.active.add(name)
        if self.state.config.observe.enable_log_requests:
            self._log(told, prompt, params)
        tenant = self.tenant.name if self.tenant is not None else ""
        outputs = self.engine.generate(prompt, params, name, priority=self.priority, tenant=tenant)
        output: OutputLike | None = None
        try:
            async for output in outputs:
                timer.output(whole=params.output_kind == FINAL_ONLY)
                for delta in taken(output, which, n, count):
                    if self.reader is not None:
                        self.reader.read(delta)
                        self._count_calls(self.reader, delta, params)
                    yield delta
        finally:
            self.state.active.discard(name)
            if (close := getattr(outputs, "aclose", None)) is not None:
                await close()
            if output is None or not output.finished:
                await self.engine.abort(name)
            latencies = timer.end(
                prompt_tokens=count.prompt_tokens,
                cached=count.cached,
                output_tokens=count.output_tokens,
                max_tokens=params.max_tokens,
                n=n,
                times=getattr(output, "metrics", None),
            )
            if (tracer := self.state.tracer) is not None:
                model, made = self.state.model_name, count.output_tokens
                tracer.request(Asked(told, model, params, count.prompt_tokens, made), latencies)

    def _count_calls(self, reader: Reader, delta: Delta, params: SamplingParams) -> None:
        if delta.finish_reason is not None and reader.reading.tools.parameters:
            called = bool(reader.outputs[delta.index].parser.calls)
            kind = next((kind for start, kind in KINDS.items() if self.id.startswith(start)), "other")  # fmt: skip
            streamed = params.output_kind != FINAL_ONLY
            self.state.metrics.read_for_calls(streamed, called, kind)

    def _log(self, name: str, prompt: Prompt, params: SamplingParams) -> None:
        most = self.state.config.observe.max_log_len
        text = None if prompt.text is None else prompt.text[:most]
        log.info(
            "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
            name, text, prompt.tokens[:most], params,
        )  # fmt: skip


def shared_name(name: str, front: int) -> str:
    """What the engine knows a request by, where several HTTP processes ask it."""
    return f"{name}@{front}"


def own_name(shared: str) -> str:
    """The name again, from that or from what the rooms below made of it."""
    return shared.rpartition("@")[0]


def taken(output: OutputLike, which: int, n: int, count: Count) -> list[Delta]:
    """The deltas of an output; what it says of the prompt goes into `count`."""
    count.cached = output.num_cached_tokens or count.cached
    if output.prompt_logprobs is not None:
        count.prompt_logprobs = output.prompt_logprobs
    found = []
    for one in output.outputs:
        if one.finish_reason == "error":
            kind = ERRORS[getattr(one, "error_kind", "internal")]
            why = getattr(one, "error", None) or "the server's log says why"
            raise kind(f"the engine failed on this request: {why}")
        tokens = list(one.token_ids)
        count.output_tokens[one.index] += len(tokens)
        found.append(
            Delta(
                prompt=which,
                index=which * n + one.index,
                text=one.text,
                tokens=tokens,
                logprobs=None if one.logprobs is None else list(one.logprobs),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
            )
        )
    return found
