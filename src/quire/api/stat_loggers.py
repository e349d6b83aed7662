"""Loggers of statistics, with vLLM's interface: classes that a program gives to `AsyncLLM.from_engine_args`.

Knows engines' snapshots. `record` gets the numbers since its last call, from `do_log_stats`, and not after each step as
in vLLM: a step waits for no logger.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.data_parallel_calls import merged_stats
from quire.logging import get_logger
from quire.observe.stats_log import StatsLog
from quire.protocol.output import EngineStats

log = get_logger(__name__)


@dataclass(slots=True)
class CacheQueries:
    """Tokens looked up in the prefix cache, and those that it had, since the last record."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """State of one engine now."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: CacheQueries = field(default_factory=CacheQueries)
    snapshot: EngineStats = field(default_factory=EngineStats)
    """Everything that Quire counts, since the engine's start."""


@dataclass(slots=True)
class IterationStats:
    """Counts of one engine since the last record."""

    iteration_timestamp: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted_reqs: int = 0


class StatLoggerBase(ABC):
    """vLLM's interface: one object for each engine."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None, engine_idx: int = 0,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def log_engine_initialized(self) -> None: ...

    def log(self) -> None:  # noqa: B027 - may be left as it is
        """Called by `do_log_stats`, after `record` of each engine."""


class AggregateStatLoggerBase(StatLoggerBase):
    """vLLM's interface: one object for all engines, whose constructor gets their numbers."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None: ...


StatLoggerFactory = Callable[..., StatLoggerBase]


class LoggingStatLogger(StatLoggerBase):
    """Writes the statistics line of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.vllm_config, self.engine_index = vllm_config, engine_index
        self.latest: dict[int, EngineStats] = {}
        self.writer = StatsLog(self._merged, engine=engine_index)
        self.last_log = time.monotonic()

    def _merged(self) -> EngineStats:
        return merged_stats(list(self.latest.values())) if self.latest else EngineStats()

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None, engine_idx: int = 0,
    ) -> None:  # fmt: skip
        if scheduler_stats is not None:
            self.latest[engine_idx] = scheduler_stats.snapshot

    def log(self) -> None:
        now = time.monotonic()
        self.writer.tick(now - self.last_log)
        self.last_log = now

    def log_engine_initialized(self) -> None:
        log.info("engine %d: %s KV blocks", self.engine_index, self.vllm_config.cache_config.num_gpu_blocks)  # fmt: skip


class AggregatedLoggingStatLogger(LoggingStatLogger, AggregateStatLoggerBase):
    """Writes one statistics line for all engines."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        super().__init__(vllm_config)
        self.engine_indexes = engine_indexes
        self.writer.name = f"{len(engine_indexes)} Engines Aggregated"

    def log_engine_initialized(self) -> None:
        log.info("%d engines: %s KV blocks each", len(self.engine_indexes), self.vllm_config.cache_config.num_gpu_blocks)  # fmt: skip


class PerEngineStatLoggerAdapter(AggregateStatLoggerBase):
    """One object of a `StatLoggerBase` class for each engine."""

    def __init__(
        self, vllm_config: Any, engine_indexes: list[int],
        per_engine_stat_logger_factory: StatLoggerFactory,
    ) -> None:  # fmt: skip
        self.engine_indexes = engine_indexes
        self.per_engine_stat_loggers = {
            index: per_engine_stat_logger_factory(vllm_config, index) for index in engine_indexes
        }

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None, engine_idx: int = 0,
    ) -> None:  # fmt: skip
        logger = self.per_engine_stat_loggers[engine_idx]
        logger.record(scheduler_stats, iteration_stats, mm_cache_stats=mm_cache_stats, engine_idx=engine_idx)  # fmt: skip

    def log(self) -> None:
        for logger in self.per_engine_stat_loggers.values():
            logger.log()

    def log_engine_initialized(self) -> None:
        for logger in self.per_engine_stat_loggers.values():
            logger.log_engine_initialized()


class StatLoggers:
    """The loggers of one AsyncLLM, and each engine's snapshot at the last record."""

    def __init__(
        self, factories: Sequence[StatLoggerFactory], vllm_config: Any, engines: list[int]
    ):
        self.before = {index: EngineStats() for index in engines}
        self.loggers: list[StatLoggerBase] = []
        for factory in factories:
            for_all = isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)
            if for_all:
                self.loggers.append(factory(vllm_config=vllm_config, engine_indexes=engines))
            else:
                self.loggers.append(PerEngineStatLoggerAdapter(vllm_config, engines, factory))
        for logger in self.loggers:
            logger.log_engine_initialized()

    def log(self, snapshots: dict[int, EngineStats]) -> None:
        """Record the engines' snapshots with every logger, then let each write."""
        for index, now in snapshots.items():
            before, self.before[index] = self.before[index], now
            scheduler, iteration = _state_of(now, before), _counts_of(now, before)
            for logger in self.loggers:
                logger.record(scheduler, iteration, engine_idx=index)
        for logger in self.loggers:
            logger.log()


def _state_of(now: EngineStats, before: EngineStats) -> SchedulerStats:
    queries = CacheQueries(
        queries=max(0, now.prefix_queries - before.prefix_queries),
        hits=max(0, now.prefix_hits - before.prefix_hits),
    )
    return SchedulerStats(
        now.running, now.waiting - now.deferred, now.deferred, now.kv_usage, queries, now
    )


def _counts_of(now: EngineStats, before: EngineStats) -> IterationStats:
    """A replaced engine counts from 0 again, so no difference is below 0."""
    return IterationStats(
        time.time(),
        max(0, now.prompt_tokens - before.prompt_tokens),
        max(0, now.generation_tokens - before.generation_tokens),
        max(0, now.preemptions - before.preemptions),
    )
