"""Which engine gets the next request, and which engine's waiting requests another engine should have.

Knows numbers of requests, and when they were reported. Does not know requests, sockets or processes. Nothing is added up
over time: the own requests of a frontend are counted where they are kept, and every report of an engine replaces the one
before it. So an error cannot grow, however long the server runs.

The score is the same as in vLLM 0.32's frontends: requests in the engine, and a penalty for a queue beside a full KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.protocol.output import EngineStats

FULL_KV = 0.5
"""Share of the KV cache in use, above which a queue counts more."""
PENALTY = 6.0


@dataclass(slots=True)
class EngineLoad:
    """What one frontend knows of one engine."""

    stats: EngineStats
    """The engine's last report."""
    own: int = 0
    """Unfinished requests of this frontend in the engine."""

    @property
    def total(self) -> int:
        return self.stats.running + self.stats.waiting

    @property
    def queued(self) -> int:
        """Requests that wait for room, and for nothing else."""
        return max(self.stats.waiting - self.stats.deferred, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """`count` waiting requests that should go from one engine to another."""

    source: int
    target: int
    count: int


class EngineBalancer:
    """The choices of one frontend among `count` engines, that `fronts` frontends share."""

    def __init__(self, count: int, fronts: int = 1):
        self.fronts = fronts
        self._turn = 0
        # For each engine: the last report, and how many requests were sent after it.
        self._sent: list[tuple[EngineStats | None, int]] = [(None, 0)] * count
        # For each engine: the report on which requests were moved last. It does not count them.
        self._moved: list[EngineStats | None] = [None] * count

    def score(self, number: int, load: EngineLoad) -> float:
        """The lower, the sooner the engine serves a new request."""
        stats = load.stats
        waiting = stats.waiting + self.fronts * self._since(number, stats)
        busy = max(self.fronts * load.own, waiting + stats.running)
        return busy + PENALTY * waiting * max(0.0, stats.kv_usage - FULL_KV)

    def choose(self, loads: Sequence[EngineLoad], allowed: Sequence[int]) -> int:
        """The engine of `allowed` with the lowest score; equal ones take turns."""
        scores = {number: self.score(number, loads[number]) for number in allowed}
        least = min(scores.values())
        best = [number for number in allowed if scores[number] == least]
        chosen = min(best, key=lambda number: (number - self._turn) % len(loads))
        self._turn = (chosen + 1) % len(loads)
        return chosen

    def sent(self, number: int, stats: EngineStats) -> None:
        """A request was sent to this engine, whose last report is `stats`."""
        self._sent[number] = stats, self._since(number, stats) + 1

    def _since(self, number: int, stats: EngineStats) -> int:
        report, count = self._sent[number]
        return count if report is stats else 0

    def move(self, loads: Sequence[EngineLoad], allowed: Sequence[int]) -> Move | None:
        """Waiting requests of a full engine that one with free rows and blocks should have; None: there are none.

        Half of the difference between the two goes over. Each frontend moves its part, and only once for each report.
        """
        fresh = [number for number in allowed if self._moved[number] is not loads[number].stats]
        free = [number for number in fresh if not self._waits(number, loads[number])]
        full = [number for number in fresh if loads[number].queued and loads[number].own]
        if not free or not full:
            return None
        target = min(free, key=lambda number: self.score(number, loads[number]))
        source = max(full, key=lambda number: (loads[number].queued, loads[number].total))
        difference = loads[source].total - self.score(target, loads[target])
        if difference < 2:
            return None
        count = min(loads[source].queued, int(difference) // 2)
        return Move(source, target, min(-(-count // self.fronts), loads[source].own))

    def moved(self, move: Move, loads: Sequence[EngineLoad]) -> None:
        """The move was made, or the engine had nothing to give; its report does not contain that."""
        self._moved[move.source] = loads[move.source].stats

    def _waits(self, number: int, load: EngineLoad) -> bool:
        return bool(load.stats.waiting or self._since(number, load.stats))
