"""ResumedRequestsGate: of the requests that ran when a process died, one at a time is on trial.

    waits ──enters, on trial──> has more tokens than when the process died ──> the next may enter

The process may have died because of one of them. If this one dies during a trial, the request on trial is the guilty one
(`engine/poison_requests.py`), and the others go on in the next process. Later requests of the queue wait until all have passed,
as they would have waited for their rows without the death. Knows requests and their order. Does not know processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

COUNTER = "requests_resumed"


class ResumedRequestsGate(Gate):
    """Only waiting requests are asked about: a step in which no request waits costs nothing."""

    name = "resumed_requests"
    order = 90  # after the gates whose `ready` begins work in other threads, which may go on during a trial

    def __init__(self, counts: dict[str, float]):
        self.counts = counts
        self.file: Path | None = None
        self.on_trial: Request | None = None
        self._holds_rest = False
        """In the plan under construction, a request waits for the end of a trial, and so do those after it."""

    def count_on(self, file: Path) -> None:
        """Go on from the count of earlier processes, which would restart at 0 with each death, and keep it in this file."""
        with suppress(OSError, ValueError):
            self.counts[COUNTER] += float(file.read_text(encoding="ascii"))
        self.file = file

    def _keep_count(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.write_text(f"{self.counts[COUNTER]:.0f}", encoding="ascii")

    def begin(self, running: Sequence[Request]) -> None:
        self._holds_rest = False
        if self.on_trial is not None and not self.on_trial.is_on_trial:
            self.on_trial = None

    def ready(self, request: Request) -> bool:
        if not self._holds_rest and self.on_trial is not None and request.is_on_trial:
            self._holds_rest = True
        return not self._holds_rest

    def is_blocking(self, request: Request) -> bool:
        return self.on_trial is not None and request.is_on_trial

    def enter(self, request: Request) -> None:
        if request.trial_length and not request.preemptions:
            self.counts[COUNTER] += 1
            self._keep_count()
        if request.is_on_trial:
            self.on_trial = request

    def leave(self, request: Request) -> None:
        if request is self.on_trial:
            self.on_trial = None
