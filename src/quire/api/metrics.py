"""`LLM.get_metrics()`: the metrics of /metrics, as objects.

Knows a client's statistics and finished requests. `observe/metric_table.py` defines the metrics.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.engine.client import EngineClient
from quire.frontend.outputs import AnyOutput, BeamSearchOutput
from quire.observe.prometheus import ServerMetrics, cache_info
from quire.observe.request_metrics import RequestTimer
from quire.observe.stats_log import StatsLog
from quire.protocol.output import EngineStats
from quire.protocol.request import RequestParams
from quire.protocol.sampling_params import SamplingParams


@dataclass(slots=True)
class Metric:
    """One time series."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A value that never decreases."""

    value: int = 0


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position. Quire has no metric of this kind yet."""

    values: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Gauge(Metric):
    """A current value."""

    value: float = 0.0


@dataclass(slots=True)
class Histogram(Metric):
    """A distribution: `buckets` maps each upper bound to the number of values up to it."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def engine_stats(client: EngineClient) -> EngineStats:
    """A new snapshot; waits for the engine."""
    return client.stats(fresh=True)


class MetricsWatch:
    """Metrics of one LLM: finished requests, and periodic statistics lines if they are enabled."""

    def __init__(self, client: EngineClient, name: str):
        config = client.resolved.config
        observe = config.observe
        self.client = client
        self.metrics = ServerMetrics(
            name, process=False, http=False,
            legacy=observe.legacy_metrics, custom=observe.custom_histogram_buckets,
        )  # fmt: skip
        ready, numbers = client.ready, config.parallel.ranks
        for number, one in zip(numbers, client.engines, strict=True):
            info = cache_info(config.cache, one.ready, one.resolved)
            self.metrics.attach(partial(engine_stats, one), ready.max_model_len, info, number)
        self.interval = config.observe.log_stats_interval
        self._log: StatsLog | None = None
        if not config.observe.disable_log_stats:
            self._log = StatsLog(lambda: engine_stats(client), self.interval)
        self._last = time.monotonic()

    def finished(self, output: AnyOutput, params: RequestParams) -> None:
        metrics = output.metrics
        if metrics is None:
            return
        generated = params if isinstance(params, SamplingParams) else None
        timer = RequestTimer(self.metrics, time.monotonic() - (time.time() - metrics.arrival_time))
        timer.end(
            prompt_tokens=len(output.prompt_token_ids),
            cached=output.num_cached_tokens or 0,
            output_tokens=[] if generated is None else [len(one.token_ids) for one in output.parts],
            max_tokens=None if generated is None else generated.max_tokens,
            n=1 if generated is None else generated.n,
            times=metrics,
        )

    def searched(self, began: float, num_prompt: int, found: BeamSearchOutput, most: int) -> None:
        """Record a beam search, begun at `began` (time.monotonic()), as one request with several outputs."""
        self.client.call("count_ended", dict(Counts(one.finish_reason for one in found.sequences)))
        RequestTimer(self.metrics, began).end(
            prompt_tokens=num_prompt, cached=0,
            output_tokens=[len(one.tokens) - num_prompt for one in found.sequences],
            max_tokens=most, n=len(found.sequences),
        )  # fmt: skip

    def tick(self) -> None:
        """Called between steps: writes the statistics line when it is due."""
        now = time.monotonic()
        if self._log is not None and now - self._last >= self.interval:
            self._log.tick(now - self._last)
            self._last = now

    def read(self) -> list[Metric]:
        """All series."""
        metrics: list[Metric] = []
        for family in self.metrics.registry.collect():
            if family.type == "histogram":
                metrics += _histograms(family)
                continue
            kind: Callable[..., Metric] = Counter if family.type == "counter" else Gauge
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    value = int(sample.value) if kind is Counter else sample.value
                    metrics.append(kind(family.name, dict(sample.labels), value))
        return metrics


def _histograms(family: Any) -> list[Metric]:
    histograms: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = histograms.setdefault(
            tuple(sorted(labels.items())), Histogram(family.name, labels)
        )
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    return list(histograms.values())
