"""Startup times: named stages, in order.

Knows a clock and names. Every process measures its own stages; EngineReady contains them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Stage = tuple[str, float]  # name, seconds

Report = Callable[[str, float], object]
"""Called with what a start does now, and the share of the weights that is loaded (0..1)."""


def no_report(stage: str, share: float) -> None:
    """Without a receiver."""


class StartupStages:
    """`with stages("load weights"): ...`"""

    def __init__(self, report: Report = no_report) -> None:
        self.done: list[Stage] = []
        self._report, self._share = report, 0.0

    def loaded(self, stage: str, share: float) -> None:
        """Report progress within a stage."""
        self._share = share
        self._report(stage, share)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._report(name, self._share)
        start = time.perf_counter()
        yield
        self.done.append((name, time.perf_counter() - start))


def since_process_start(pid: int | None = None) -> float:
    """Seconds since a process started (default: this one); 0.0 if there is no /proc."""
    try:
        ticks = int(Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(uptime - ticks / 100, 0.0)  # USER_HZ is 100 on every Linux that Python runs on


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
