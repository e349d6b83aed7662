"""Exports the statistics of engines to Prometheus: the entries of `metric_table.py` that are read at each scrape.

Knows snapshots of engines. Does not know requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.observe.buckets import buckets
from quire.observe.metric_table import (
    COUNT_LABELS,
    COUNTS,
    ENGINE_HISTOGRAMS,
    GAUGES,
    INFOS,
    SNAPSHOTS,
    ObservedMetric,
    SnapshotMetric,
)
from quire.protocol.output import EngineStats

ENGINE = "0"
"""The label of a single engine."""


class SnapshotCollector(Collector):
    """Reads the statistics of each engine at each scrape. `engines`: by the value of the label `engine`; may be filled later."""

    def __init__(
        self,
        model_name: str,
        engines: Mapping[str, Callable[[], EngineStats]],
        legacy: bool,
        custom: Mapping[str, tuple[float, ...]],
    ):
        self.model_name, self.engines = model_name, engines
        self.custom = custom
        self.rows = [row for row in SNAPSHOTS if legacy or not row.legacy]

    def collect(self) -> Iterable[Metric]:
        each = {engine: stats() for engine, stats in self.engines.items()} or {
            ENGINE: EngineStats()
        }
        for one in self.rows:
            yield self.metric(one, each)
        for key, row in ENGINE_HISTOGRAMS.items():
            found = {engine: s.histograms[key] for engine, s in each.items() if key in s.histograms}
            if found:
                yield self.histogram(row, found)
        yield from self.counters({engine: stats.counts for engine, stats in each.items()})
        for name, (words, labels) in INFOS.items():
            for stats in each.values():
                if stats.labels.keys() >= set(labels):
                    info = GaugeMetricFamily(name, words, labels=labels)
                    info.add_metric([stats.labels[label] for label in labels], time.time())
                    yield info
                    break  # its labels do not name the engine

    def counters(self, each: Mapping[str, Mapping[str, float]]) -> Iterable[Metric]:
        """`each`: of an engine, by a name of COUNTS, which a colon and the value of its label may follow."""
        families: dict[str, CounterMetricFamily] = {}
        for engine, counts in each.items():
            for key, count in counts.items():
                name, _, value = key.partition(":")
                if name in GAUGES:
                    continue
                own = [value] if value else []
                if name not in families:
                    labels = ["model_name", "engine", *([COUNT_LABELS[name]] if value else [])]
                    families[name] = CounterMetricFamily(*COUNTS[name], labels=labels)
                families[name].add_metric([self.model_name, engine, *own], count)
        return families.values()

    def histogram(self, row: ObservedMetric, each: Mapping[str, list[float]]) -> Metric:
        metric = HistogramMetricFamily(row.name, row.help, labels=["model_name", "engine"])
        bounds = [*map(floatToGoString, buckets(row.family, 0, self.custom)), "+Inf"]
        for engine, values in each.items():
            counts = zip(bounds, accumulate(values[:-1]), strict=True)
            metric.add_metric([self.model_name, engine], list(counts), values[-1])
        return metric

    def metric(self, row: SnapshotMetric, each: Mapping[str, EngineStats]) -> Metric:
        labels = ["model_name", "engine"] + ([row.label] if row.label else [])
        kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
        metric = kind(row.name, row.help, labels=labels)
        for engine, stats in each.items():
            value = row.value(stats)
            if isinstance(value, Mapping):
                for label, number in value.items():
                    metric.add_metric([self.model_name, engine, label], number)
            else:
                metric.add_metric([self.model_name, engine], value)
        return metric
