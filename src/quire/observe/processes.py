"""process_* of several processes, told apart by a label; and the files in which each keeps what it counts.

Knows process ids and what the kernel tells of them. Does not know what the processes are for.
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

FIRST_BYTES = 1 << 16  # of a file of values

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


class AllocatedDict(MmapedDict):
    """Values in a file that has its blocks before they are written: a mapped page that a full disk does not have ends the
    process. Where the disk has no room, the values go on in memory, and only this process tells them no longer."""

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
        log.warning("metrics of this process are told no longer: %s", why)
        fd = os.memfd_create("quire-metrics")
        os.write(fd, data)
        super().__init__(f"/proc/self/fd/{fd}")  # type: ignore[no-untyped-call]
        os.close(fd)


def allocate_files() -> None:
    """Have prometheus_client keep values in AllocatedDicts. Before the first metric is made."""
    values.MmapedDict = AllocatedDict  # type: ignore[attr-defined]
