"""process_* metrics of several processes, with a label for each; and the files that share metrics between processes.

Knows process ids and what /proc says about them. Does not know what the processes do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import values
from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from quire.logging import get_logger

log = get_logger(__name__)

FIRST_BYTES = 1 << 16  # initial size of a metrics file

Processes = Callable[[], Mapping[int, str]]


class FamilyCollector(Collector):
    """`processes`: returns the current processes, pid -> name."""

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


class AllocatedDict(MmapedDict):
    """Metric values in a file whose blocks are allocated before use: on a full disk, a write to a mapped page without a
    block kills the process. If the disk is full, values stay in memory, and scrapes no longer include this process."""

    def __init__(self, filename: str, read_mode: bool = False):
        try:
            if not read_mode:
                with open(filename, "a+b") as file:
                    if not os.fstat(file.fileno()).st_size:
                        os.posix_fallocate(file.fileno(), 0, FIRST_BYTES)
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
        except OSError as why:
            if read_mode:
                raise
            self._leave_disk(b"", why)

    def _init_value(self, key: str) -> None:
        if self._f is not None and self._used + len(key.encode()) + 64 > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
            except OSError as why:
                data = bytes(self._m)
                self.close()  # type: ignore[no-untyped-call]
                self._leave_disk(data, why)
        super()._init_value(key)  # type: ignore[no-untyped-call]

    def _leave_disk(self, data: bytes, why: OSError) -> None:
        log.warning("metrics of this process are no longer exported: %s", why)
        fd = os.memfd_create("quire-metrics")
        os.write(fd, data)
        super().__init__(f"/proc/self/fd/{fd}")  # type: ignore[no-untyped-call]
        os.close(fd)


def allocate_files() -> None:
    """Make prometheus_client store values in AllocatedDicts. Call it before the first metric is made."""
    values.MmapedDict = AllocatedDict  # type: ignore[attr-defined]
