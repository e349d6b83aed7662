"""The engine requests of one HTTP request to a pooling route: each prompt becomes one, and its output a tensor.

    prompts -> tokenized in groups, in threads if they are long -> engine, some ahead -> outputs in order

Knows prompts, times and counts. Does not know answer shapes. However it ends (complete, failed, client disconnected), it
aborts every engine request that still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.api.async_engine import BREATH_S, LONG_TEXT, AsyncEngine, OutputStream
from quire.frontend.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.prompts import Prompt
from quire.observe.request_metrics import RequestTimer
from quire.observe.tracing import SpanAttributes
from quire.protocol.pooling_params import PoolingParams
from quire.server.api_keys import Tenant
from quire.server.engine_requests import Wakeup, log_request, new_output, out_of_time, prompt_ids
from quire.server.errors import ApiError, invalid
from quire.server.state import ServerState

Output = PoolingRequestOutput[PoolingOutput]
GROUP = 128  # prompts that are tokenized together
GROUP_SIZE = 256 << 10  # ... and their characters
MOST_TOKENS_AHEAD = 1 << 17  # of one HTTP request in the engine: far more than a step takes
NUMBERS_PER_ENTRY = 16
"""Numbers of an answer that take the memory of an entry (--max-answer-entries)."""


@dataclass(slots=True)
class PromptSource:
    """The prompts of a request, made and tokenized when they are needed."""

    count: int
    size: Callable[[int], int]
    """Characters of a prompt, about."""
    prepare: Callable[[int, int], list[Prompt]]
    """Tokenizes the prompts of a range; may run in any thread."""


@dataclass(slots=True)
class RunningText:
    """The engine request of a prompt."""

    which: int
    name: str
    """Its id in the engine."""
    public_id: str
    """Its id for the user."""
    num_tokens: int
    timer: RequestTimer
    stream: OutputStream | None = None


@dataclass(slots=True)
class PoolingBatch:
    """Call `run`, once."""

    state: ServerState
    engine: AsyncEngine
    id: str
    source: PromptSource
    params: PoolingParams
    priority: int = 0
    timeout: float | None = None
    tenant: Tenant | None = None
    adapter: str | None = None
    numbers_per_token: int = 0
    """Length of a token's row in the answer; 0: the answer has no rows of tokens."""
    data_parallel_rank: int | None = None
    """The engine that must serve the request; None: any."""
    num_tokens: int = 0
    num_cached: int = 0
    _outputs: dict[int, Output] = field(default_factory=dict)
    _running: dict[int, RunningText] = field(default_factory=dict)
    _changed: deque[RunningText] = field(default_factory=deque)
    _wakeup: Wakeup = field(default_factory=Wakeup)
    _tokens_ahead: int = 0

    async def run(self) -> list[Output]:
        """The output of each prompt, in order.

        Raises:
            ValidationError: a prompt is invalid.
            ApiError: 408 when `timeout` ran out.
            QuireError: a request failed.
        """
        try:
            async with asyncio.timeout(self.timeout) as clock:
                await self._run()
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise out_of_time(self.timeout) from error
        finally:
            for running in tuple(self._running.values()):
                self._end(running)
            if self.tenant is not None and self.tenant.name:
                self.state.metrics.by_key(self.tenant.name, self.num_tokens, 0)
        return [self._outputs[at] for at in range(self.source.count)]

    async def _run(self) -> None:
        until = time.monotonic() + BREATH_S
        for start, stop, size in self._groups():
            if size < LONG_TEXT:
                prompts = self.source.prepare(start, stop)
            else:
                prompts = await self.engine.in_thread(size, self.source.prepare, start, stop)
            for which, prompt in enumerate(prompts, start):
                while self._tokens_ahead >= MOST_TOKENS_AHEAD:
                    await self._next()
                await self._open_request(which, prompt)
                if time.monotonic() > until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + BREATH_S
        while self._running:
            await self._next()

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        """Ranges of prompts and their sizes."""
        start = size = 0
        for at in range(self.source.count):
            more = self.source.size(at)
            if at > start and (at - start >= GROUP or size + more > GROUP_SIZE):
                yield start, at, size
                start, size = at, 0
            size += more
        yield start, self.source.count, size

    async def _open_request(self, which: int, prompt: Prompt) -> None:
        public_id, name = prompt_ids(self.state, self.id, which, self.source.count)
        log_request(self.state, public_id, prompt, self.params)
        timer = RequestTimer(self.state.metrics)
        running = RunningText(which, name, public_id, len(prompt.tokens), timer)
        self._count(running.num_tokens)
        self._running[which] = running
        self.state.active.add(name)
        tenant = self.tenant.id if self.tenant is not None else ""
        running.stream = await self.engine.open(
            prompt, self.params, name, partial(self._on_output, running), priority=self.priority, tenant=tenant,
            adapter=self.adapter, data_parallel_rank=self.data_parallel_rank,
        )  # fmt: skip

    def _count(self, num_tokens: int) -> None:
        """Raises ApiError: the answer would have too many numbers."""
        self.num_tokens += num_tokens
        self._tokens_ahead += num_tokens
        if self.tenant is not None and self.tenant.name:
            self.tenant.tokens.take(num_tokens)
        most = NUMBERS_PER_ENTRY * self.state.config.server.max_answer_entries
        if self.num_tokens * self.numbers_per_token > most:
            raise invalid(
                f"the response would have more than {most} numbers ({self.numbers_per_token} for each token); send fewer"
                " or shorter inputs in one request (--max-answer-entries)",
                "input",
            )  # fmt: skip

    def _on_output(self, running: RunningText) -> None:
        self._changed.append(running)
        self._wakeup.set()

    async def _next(self) -> None:
        """Wait for outputs, and take them."""
        while not self._changed:
            await self._wakeup.wait()
        while self._changed:
            running = self._changed.popleft()
            if running.which in self._running and running.stream is not None:
                self._take(running, running.stream)

    def _take(self, running: RunningText, stream: OutputStream) -> None:
        output: Output | None = new_output(stream, self.state, self.adapter)
        if output is None:
            return
        running.timer.output(whole=True)
        self._end(running, output)
        if output.finish_reason == "abort":
            raise ApiError(409, "the request was aborted")
        self.num_cached += output.num_cached_tokens
        output.prompt_token_ids = []  # of no use any more
        self._outputs[running.which] = output

    def _end(self, running: RunningText, output: Output | None = None) -> None:
        """Remove a request that has ended or is no longer needed, and record its metrics."""
        del self._running[running.which]
        self._tokens_ahead -= running.num_tokens
        self.state.active.discard(running.name)
        if running.stream is None:
            return
        running.stream.close()
        latencies = running.timer.end(
            prompt_tokens=running.num_tokens, cached=0 if output is None else output.num_cached_tokens,
            output_tokens=[], max_tokens=None, n=1, times=None if output is None else output.metrics,
        )  # fmt: skip
        if (tracer := self.state.tracer) is not None:
            model = self.state.model_name
            about = SpanAttributes(running.public_id, model, self.params, running.num_tokens, [])
            tracer.request(about, latencies)

    @property
    def usage(self) -> dict[str, Any]:
        details = self.state.config.server.enable_prompt_tokens_details
        return {
            "prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.num_cached} if details else None,
        }  # fmt: skip
