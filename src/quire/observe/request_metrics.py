"""Times and counts of one request, for the metrics and the log.

Knows times and counts. Does not know text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.observe.prometheus import ServerMetrics

MOST_GAPS = 64  # gaps of a stream per update, so that dashboards see a long stream before it ends


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Latencies of one request, in seconds; None: not known."""

    since_arrival: float
    """Arrival until now; the other intervals end with the last token."""
    whole: float
    queued: float
    inference: float
    first_token: float | None = None
    prefill: float | None = None
    decode: float | None = None


@dataclass(slots=True)
class RequestTimer:
    """Create it when a request arrives; call `output` for each output and `end` once. Uses time.monotonic().

    Gaps between outputs reach the histogram MOST_GAPS at a time: one by one they would cost more than the text does.
    """

    metrics: ServerMetrics
    arrived: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    engine: int = 0
    """Which engine serves the request; 0 until its first output."""

    def output(self, *, whole: bool = False) -> None:
        """New tokens arrived; `whole`: all at once, which shows nothing about the first token's time."""
        now = time.monotonic()
        if whole:
            pass
        elif self.last is None:
            self.first = now
            self.metrics.observe(
                "vllm:time_to_first_token_seconds", now - self.arrived, self.engine
            )
        else:
            self.gaps.append(now - self.last)
            if len(self.gaps) == MOST_GAPS:
                self._tell_gaps()
        self.last = now

    def _tell_gaps(self) -> None:
        self.metrics.observe_all("vllm:inter_token_latency_seconds", self.gaps, self.engine)
        self.gaps.clear()

    def end(
        self,
        *,
        prompt_tokens: int,
        cached: int,
        output_tokens: list[int],
        max_tokens: int | None,
        n: int,
        times: Any = None,
    ) -> RequestLatencies:
        """`output_tokens`: token count of each completion; none for a request that generates no tokens. `times`: the frontend's RequestMetrics, if any."""
        self._tell_gaps()
        now = self.last or time.monotonic()
        self.engine = int(getattr(times, "engine", self.engine))
        queued = float(getattr(times, "queued", 0.0) or 0.0)
        preemptions = int(getattr(times, "num_preemptions", 0) or 0)
        latency = getattr(times, "first_token_latency", None)
        if self.first is None and latency:
            self.first = self.arrived + latency
            self.metrics.observe("vllm:time_to_first_token_seconds", latency, self.engine)
        observe = partial(self.metrics.observe, engine=self.engine)
        latencies = self._latencies(now, queued)
        observe("vllm:e2e_request_latency_seconds", latencies.whole)
        observe("vllm:request_queue_time_seconds", queued)
        observe("vllm:request_inference_time_seconds", latencies.inference)
        if (
            self.first is not None
            and latencies.prefill is not None
            and latencies.decode is not None
        ):
            observe("vllm:request_prefill_time_seconds", latencies.prefill)
            observe("vllm:request_decode_time_seconds", latencies.decode)
            if (longest := max(output_tokens, default=0)) > 1 and now > self.first:
                observe(
                    "vllm:request_time_per_output_token_seconds", (now - self.first) / (longest - 1)
                )
        observe("vllm:request_prompt_tokens", prompt_tokens)
        observe("vllm:request_prefill_kv_computed_tokens", max(0, prompt_tokens - cached))
        if output_tokens:
            observe("vllm:request_generation_tokens", sum(output_tokens))
            observe("vllm:request_max_num_generation_tokens", max(output_tokens))
        if max_tokens is not None:
            observe("vllm:request_params_max_tokens", max_tokens)
        observe("vllm:request_params_n", n)
        observe("vllm:request_num_preemptions", preemptions)
        return latencies

    def _latencies(self, now: float, queued: float) -> RequestLatencies:
        since, whole = time.monotonic() - self.arrived, now - self.arrived
        inference = max(0.0, whole - queued)
        if self.first is None:
            return RequestLatencies(since, whole, queued, inference)
        first = self.first - self.arrived
        prefill = max(0.0, first - queued)
        return RequestLatencies(since, whole, queued, inference, first, prefill, now - self.first)
