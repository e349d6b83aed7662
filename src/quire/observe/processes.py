"""process_* of several processes, told apart by a label.

Knows process ids and what the kernel tells of them. Does not know what the processes are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

Processes = Callable[[], Mapping[int, str]]


class FamilyCollector(Collector):
    """`processes`: which there are now, pid -> name."""

    def __init__(self, processes: Processes):
        self.processes = processes

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for pid, name in self.processes().items():
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                into = found.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    into.add_sample(sample.name, {**sample.labels, "process": name}, sample.value)
        return found.values()
