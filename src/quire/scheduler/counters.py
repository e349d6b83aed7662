"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Counters; they never decrease."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generation_tokens
