"""Progress of a load: the share of the weights that is read, then converted. A bar on a terminal, log lines elsewhere.

Knows sizes and time. Does not know models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from quire.logging import get_logger
from quire.startup_timer import Report, no_report

log = get_logger(__name__)

REPORT_EVERY_S = 0.2
LOG_EVERY_S = 5.0
BAR_AFTER_S = 1.0  # a faster load shows no bar

Item = TypeVar("Item")


class LoadProgress:
    """Counts the phases of one load.

    Args:
        report: called with the phase and the share of the whole load.
        bar: show a bar if stderr is a terminal.
    """

    def __init__(self, report: Report = no_report, bar: bool = True):
        self._report, self._bar = report, bar
        self._share = 0.0
        self._reported_at = self._logged_at = time.monotonic()

    def each(
        self, phase: str, items: Iterable[Item], size: Callable[[Item], int], total: int,
        until: float, unit: str = "B",
    ) -> Iterator[Item]:  # fmt: skip
        """Yield the items, and count each when the caller has used it.

        Args:
            size: of an item, in `unit`.
            total: their sum.
            until: the share of the whole load at the end of this phase.
        """
        before, done = self._share, 0
        self._report(phase, before)
        with tqdm(
            total=total, desc=phase, unit=unit, unit_scale=unit == "B", unit_divisor=1024,
            delay=BAR_AFTER_S, leave=False, disable=None if self._bar else True,
        ) as bar:  # fmt: skip
            for item in items:
                count = size(item)
                yield item
                del item  # a tensor would stay in memory while the next is read
                done += count
                bar.update(count)
                part = min(done / total, 1.0) if total else 1.0
                self._share = before + (until - before) * part
                self._tell(
                    phase, f"{100 * part:.0f} % of {_amount(total, unit)}", bool(bar.disable)
                )
        self._share = until
        self._report(phase, until)

    def _tell(self, phase: str, amount: str, logs: bool) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._report(phase, self._share)
        if logs and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.info("%s: %s", phase, amount)


def _amount(total: int, unit: str) -> str:
    return f"{total / (1 << 30):.2f} GiB" if unit == "B" else f"{total}{unit}"
