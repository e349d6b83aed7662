"""What generations and poolings have in common: the names of their engine requests, the log, outputs, refusals, times.

Knows engine requests one by one. Does not know their outputs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.api.async_engine import OutputStream
from quire.errors import QueueFull, ValidationError
from quire.frontend.beam_search import BeamStream
from quire.frontend.prompts import Prompt
from quire.logging import get_logger
from quire.observe.prometheus import REQUESTS, TOKENS
from quire.observe.request_metrics import RequestTimer
from quire.observe.tracing import SpanAttributes
from quire.protocol.request import RequestParams
from quire.server.adapters import unloaded_meanwhile
from quire.server.endpoint import NamedBody, RequestContext
from quire.server.errors import ApiError

log = get_logger(__name__)


class TimedBody(NamedBody, Protocol):
    """A body that may limit its time."""

    timeout: float | None


@dataclass(slots=True)
class RunningRequest:
    """The engine request of a prompt."""

    which: int
    """Index of the prompt in the HTTP request."""
    name: str
    """Its id in the engine."""
    public_id: str
    """Its id for the user."""
    num_tokens: int
    """Of the prompt."""
    params: RequestParams
    timer: RequestTimer
    stream: OutputStream | BeamStream | None = None
    times: Any = None
    """The frontend's RequestMetrics, if any."""


@dataclass(slots=True)
class EngineRequests:
    """The engine requests of one HTTP request: `begin`, open, `take` and `end` for each."""

    context: RequestContext
    id: str
    body: TimedBody
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    def begin(self, which: int, count: int, prompt: Prompt, params: RequestParams) -> RunningRequest:  # fmt: skip
        """Register the request of a prompt, one of `count`: its name is one that no other request in the engine has."""
        state = self.context.state
        public = name = self.id if count == 1 else f"{self.id}-{which}"
        if state.fronts > 1:  # clients of other HTTP processes choose ids too
            name = shared_name(name, state.front)
        name = f"{name}-{secrets.token_hex(4)}" if name in state.active else name
        if state.config.observe.enable_log_requests:
            log_request(state.config.observe.max_log_len, public, prompt, params)
        state.active.add(name)
        timer = RequestTimer(state.metrics)
        return RunningRequest(which, name, public, len(prompt.tokens), params, timer)

    def take(self, running: RunningRequest) -> Any:
        """The new output; None: there is none yet, or no more will come. A refusal is counted.

        Raises:
            ApiError: 404: the adapter was unloaded before the request reached the engine.
            QuireError: the request failed.
        """
        try:
            return None if running.stream is None else running.stream.take()
        except QueueFull as error:
            self.context.state.metrics.refused(TOKENS if TOKENS in str(error) else REQUESTS)
            raise
        except ValidationError as error:
            raise unloaded_meanwhile(error, self.context.adapter) or error from None

    def end(
        self,
        running: RunningRequest,
        cached: int,
        output_tokens: list[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """Forget a request that has ended or is no longer needed, and record its metrics."""
        state = self.context.state
        state.active.discard(running.name)
        if running.stream is None:
            return
        running.stream.close()
        latencies = running.timer.end(
            prompt_tokens=running.num_tokens, cached=cached, output_tokens=output_tokens, max_tokens=max_tokens, n=n,
            times=running.times,
        )  # fmt: skip
        if (tracer := state.tracer) is not None:
            name, params = running.public_id, running.params
            attributes = SpanAttributes(name, state.model_name, params, running.num_tokens, output_tokens)  # fmt: skip
            tracer.request(attributes, latencies)


def log_request(most: int | None, name: str, prompt: Prompt, params: RequestParams) -> None:
    """A line in the log, with --enable-log-requests. `most`: characters, and tokens, of the prompt."""
    text = None if prompt.text is None else prompt.text[:most]
    log.info(
        "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
        name, text, prompt.tokens[:most], params,
    )  # fmt: skip


def out_of_time(seconds: float | None) -> ApiError:
    return ApiError(
        408, f"the request did not finish within {seconds:g} s (`timeout`)", param="timeout"
    )


def shared_name(name: str, front: int) -> str:
    """The id of a request in an engine that several HTTP processes share."""
    return f"{name}@{front}"


def own_name(shared: str) -> str:
    """The inverse of `shared_name`, also for ids that the frontend derived from it."""
    return shared.rpartition("@")[0]


def cached_details(num_cached: int, by_source: Mapping[str, int]) -> dict[str, Any]:
    """How many tokens of the prompts were cached, as fields of usage.

    `cached_tokens_by_source`, where they came from, is an extension, and only there if some were.
    """
    found: dict[str, Any] = {"cached_tokens": num_cached}
    return found | {"cached_tokens_by_source": dict(by_source)} if by_source else found
