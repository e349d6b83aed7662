"""The engine requests of one HTTP request to a pooling route: each prompt becomes one, and its output a tensor.

    prompts -> tokenized in groups, in threads if they are long -> engine, some ahead -> outputs in order

Knows prompts, times and counts. Does not know answer shapes. However it ends (complete, failed, client disconnected), it
aborts every engine request that still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response

from quire.api.async_engine import BREATH_S, LONG_TEXT
from quire.frontend.pooling.outputs import Floats, PoolingOutput, PoolingRequestOutput
from quire.frontend.prompts import Prompt
from quire.protocol.pooling_params import PoolingParams
from quire.server.engine_requests import (
    EngineRequests,
    RunningRequest,
    cached_details,
    out_of_time,
)
from quire.server.errors import ApiError, invalid
from quire.server.wakeup import Wakeup

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
class PoolingBatch(EngineRequests):
    """Call `whole`, once."""

    prompts: PromptSource
    params: PoolingParams
    numbers_per_token: int = 0
    """Length of a token's row in the answer; 0: the answer has no rows of tokens."""
    num_tokens: int = 0
    num_cached: int = 0
    cached_by_source: Counter[str] = field(default_factory=Counter)
    _outputs: dict[int, Output] = field(default_factory=dict)
    _running: dict[int, RunningRequest] = field(default_factory=dict)
    _changed: deque[RunningRequest] = field(default_factory=deque)
    _wakeup: Wakeup = field(default_factory=Wakeup)
    _tokens_ahead: int = 0

    async def whole(self) -> list[Output]:
        """The output of each prompt, in order.

        Raises:
            ValidationError: a prompt is invalid.
            ApiError: 408 when `timeout` ran out.
            QuireError: a request failed.
        """
        try:
            async with asyncio.timeout(self.body.timeout) as clock:
                await self._run()
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise out_of_time(self.body.timeout) from error
        finally:
            for running in tuple(self._running.values()):
                self._end(running)
            if (tenant := self.context.tenant) is not None and tenant.name:
                self.context.state.metrics.by_key(tenant.name, self.num_tokens, 0)
        return [self._outputs[index] for index in range(self.prompts.count)]

    async def _run(self) -> None:
        until = time.monotonic() + BREATH_S
        for start, stop, size in self._groups():
            if size < LONG_TEXT:
                prompts = self.prompts.prepare(start, stop)
            else:
                in_thread = self.context.engine.in_thread
                prompts = await in_thread(size, self.prompts.prepare, start, stop)
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
        for index in range(self.prompts.count):
            more = self.prompts.size(index)
            if index > start and (index - start >= GROUP or size + more > GROUP_SIZE):
                yield start, index, size
                start, size = index, 0
            size += more
        yield start, self.prompts.count, size

    async def _open_request(self, which: int, prompt: Prompt) -> None:
        running = self.begin(which, self.prompts.count, prompt, self.params)
        self._running[which] = running
        self._count(running.num_tokens)
        on_output = partial(self._on_output, running)
        options = self.context.engine_options(self.body)
        running.stream = await self.context.engine.open(
            prompt, self.params, running.name, on_output, **options
        )

    def _count(self, num_tokens: int) -> None:
        """Raises ApiError: the answer would have too many numbers."""
        self.num_tokens += num_tokens
        self._tokens_ahead += num_tokens
        if (tenant := self.context.tenant) is not None and tenant.name:
            tenant.tokens.take(num_tokens)
        limit = NUMBERS_PER_ENTRY * self.context.state.config.server.max_answer_entries
        if self.num_tokens * self.numbers_per_token > limit:
            raise invalid(
                f"the response would have more than {limit} numbers ({self.numbers_per_token} for each token); send fewer"
                " or shorter inputs in one request (--max-answer-entries)",
                "input",
            )

    def _on_output(self, running: RunningRequest) -> None:
        self._changed.append(running)
        self._wakeup.set()

    async def _next(self) -> None:
        """Wait for outputs, and take them."""
        while not self._changed:
            await self._wakeup.wait()
        while self._changed:
            running = self._changed.popleft()
            if running.which in self._running:
                self._take(running)

    def _take(self, running: RunningRequest) -> None:
        output: Output | None = self.take(running)
        if output is None:
            return
        running.timer.output(whole=True)
        running.times = output.metrics
        self._end(running, output.num_cached_tokens)
        if output.finish_reason == "abort":
            raise ApiError(409, "the request was aborted")
        self.num_cached += output.num_cached_tokens
        self.cached_by_source.update(output.cached_tokens_by_source or {})
        output.prompt_token_ids = []  # of no use any more
        self._outputs[running.which] = output

    def _end(self, running: RunningRequest, cached: int = 0) -> None:
        del self._running[running.which]
        self._tokens_ahead -= running.num_tokens
        self.end(running, cached, [])

    @property
    def usage(self) -> dict[str, Any]:
        details = self.context.state.config.server.enable_prompt_tokens_details
        cached = cached_details(self.num_cached, self.cached_by_source)
        return {
            "prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0,
            "prompt_tokens_details": cached if details else None,
        }  # fmt: skip

    def head(self) -> dict[str, Any]:
        """The fields with which most answers begin."""
        return {"id": self.id, "object": "list", "created": self.created, "model": self.context.model}  # fmt: skip


@dataclass(slots=True)
class PoolingAnswer:
    """The answer of a route: `respond` makes it of the arrays of all outputs."""

    source: PoolingBatch
    respond: Callable[[list[Floats]], Response]

    async def response(self, outputs: list[Output]) -> Response:
        return self.respond([output.outputs.array for output in outputs])
