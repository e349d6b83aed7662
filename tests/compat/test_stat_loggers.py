"""Classes of vLLM for statistics, given to AsyncLLM."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.api import stat_loggers
from quire.api.stat_loggers import (
    AggregatedLoggingStatLogger,
    IterationStats,
    LoggingStatLogger,
    SchedulerStats,
    StatLoggerBase,
    StatLoggers,
)
from quire.protocol.output import EngineStats


class Kept(StatLoggerBase):
    """A program's own logger."""

    def __init__(self, vllm_config, engine_index=0):
        self.blocks, self.engine = vllm_config.cache_config.num_gpu_blocks, engine_index
        self.records: list[tuple[SchedulerStats, IterationStats, int]] = []
        self.logs = 0
        instances.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.records.append((scheduler_stats, iteration_stats, engine_idx))

    def log_engine_initialized(self):
        self.initialized = True

    def log(self):
        self.logs += 1


instances: list[Kept] = []


@pytest.fixture(autouse=True)
def lines(caplog):
    caplog.set_level(logging.INFO, "quire")
    instances.clear()
    return caplog


def test_async_llm_writes_with_a_programs_loggers(lines, monkeypatch):
    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")

    async def main() -> None:
        args = AsyncEngineArgs(model="quire-tiny", max_model_len=64)
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[AggregatedLoggingStatLogger, Kept])
        try:
            params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
            async for _ in llm.generate("Once upon a time", params, "a"):
                pass
            await llm.do_log_stats()
            await llm.do_log_stats()
        finally:
            llm.shutdown()

    asyncio.run(main())
    assert "1 Engines Aggregated: Avg prompt throughput" in lines.text
    (kept,) = instances
    assert kept.initialized
    assert (kept.engine, kept.logs) == (0, 2)
    assert kept.blocks > 0
    (state, counts, engine), (_, nothing, _) = kept.records
    assert (engine, counts.num_generation_tokens) == (0, 5)
    assert counts.num_prompt_tokens > 0
    assert (nothing.num_generation_tokens, nothing.num_prompt_tokens) == (0, 0)
    assert state.num_running_reqs == 0


def test_each_engine_has_a_logger_and_all_have_an_aggregate(lines):
    config = type("Config", (), {"cache_config": type("Cache", (), {"num_gpu_blocks": 9})})
    loggers = StatLoggers([AggregatedLoggingStatLogger, LoggingStatLogger, Kept], config, [2, 3])
    assert [kept.engine for kept in instances] == [2, 3]
    snapshots = {2: EngineStats(running=1, waiting=3, deferred=2), 3: EngineStats(running=4)}
    loggers.log(snapshots)
    assert "2 Engines Aggregated: " in lines.text
    assert "Running: 5 reqs" in lines.text
    assert "Engine 002: " in lines.text
    assert "Engine 003: " in lines.text
    ((state, _, engine),) = instances[0].records
    waiting = (state.num_running_reqs, state.num_waiting_reqs, state.num_skipped_waiting_reqs)
    assert (engine, *waiting) == (2, 1, 1, 2)


def test_an_engine_that_was_replaced_counts_from_zero():
    counts = stat_loggers._counts_of(EngineStats(generation_tokens=3), EngineStats(generation_tokens=9))  # fmt: skip
    assert counts.num_generation_tokens == 0
