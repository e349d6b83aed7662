"""The periodic statistics log line, in vLLM's format, which people search logs for.

Knows two snapshots of the engine. Does not know single requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.logging import get_logger
from quire.observe.speculation_log import speculation_line
from quire.protocol.output import EngineStats

log = get_logger("quire.observe.stats")


@dataclass(slots=True)
class StatsLog:
    """Call `tick` every `interval` seconds."""

    latest: Callable[[], EngineStats]
    interval: float = 10.0
    device: str = "CPU"
    before: EngineStats = field(default_factory=EngineStats)
    was_idle: bool = True
    prompt: float = 0.0
    """Prompt tokens per second at the last tick; `generation` likewise."""
    generation: float = 0.0
    engine: int = 0
    """Number of the engine."""
    name: str = ""
    """Begins the line instead of the engine's number."""

    def tick(self, seconds: float, write: bool = True) -> str:
        """Log and return the line for the last `seconds`; at level DEBUG while the engine is idle."""
        now, before = self.latest(), self.before
        self.before = now
        prompt = rate(now.prompt_tokens, before.prompt_tokens, seconds)
        generation = rate(now.generation_tokens, before.generation_tokens, seconds)
        self.prompt, self.generation = prompt, generation
        queries = now.prefix_queries
        hits, states = 100.0 * now.prefix_hits / queries if queries else 0.0, ""
        if (blocks := now.counts.get("prefix_kv_hits", 0)) > now.prefix_hits:
            states = f" (KV blocks {100 * blocks / queries:.1f}%, recurrent states {hits:.1f}%)"
        deferred = f"Deferred: {now.deferred} reqs, " if now.deferred else ""
        preemptions = f"Preemptions: {now.preemptions}, " if now.preemptions else ""
        line = (
            f"{self.name or f'Engine {self.engine:03d}'}: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generation:.1f} tokens/s, "
            f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, {deferred}{preemptions}"
            f"{self.device} KV cache usage: {100 * now.kv_usage:.1f}%, Prefix cache hit rate: {hits:.1f}%"
            f"{states}"
        )
        idle = not (prompt or generation or now.running or now.waiting)
        if not write:
            pass
        elif idle and self.was_idle:
            log.debug(line)
        else:
            log.info(line)
            if speculation := speculation_line(now, before, seconds):
                log.info(speculation)
        self.was_idle = idle
        return line


def rate(now: int, before: int, seconds: float) -> float:
    return max(0, now - before) / seconds if seconds > 0 else 0.0
