"""Builds an engine from a configuration: features, executor, scheduler, core, client.

Knows no feature by name: `enabled_features.py` lists them.

Loads torch only where it builds a worker (`worker/build.py`): the HTTP process, which calls `make_client(process=True)`,
uses this file without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal, overload

import msgspec

from quire import env
from quire.config.engine import EngineConfig, Resolved
from quire.config.parallel.nodes import check_head
from quire.engine import rpc, sleep
from quire.engine.build_executor import build_executor
from quire.engine.client import EngineClient, InlineClient
from quire.engine.core import EngineCore
from quire.engine.enabled_features import enabled_features
from quire.engine.engine_launcher import start_engines
from quire.engine.feature import EngineParts, Feature
from quire.engine.flight_recorder import FlightRecorder
from quire.engine.kv_identity import digest_of, kv_facts
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_metrics import ObservedBlockPool
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.checkpoints import CheckpointPool
from quire.kvcache.layout import CacheLayout, layout
from quire.kvcache.manager import KVManager
from quire.kvstore.key_file import name_key
from quire.observe.buckets import buckets, checked
from quire.observe.inspector import Inspector
from quire.observe.metric_table import ITERATION
from quire.observe.mfu import StepCostCounter, StepCosts
from quire.processes.watchdog import Watchdog
from quire.protocol.output import EngineReady
from quire.protocol.tensor_data import ITEMSIZE
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.startup_timer import Report, no_report
from quire.version import __version__
from quire.worker.memory_forecast import forecast_weights
from quire.worker.worker_info import WorkerInfo


# -- public ---------------------------------------------------------------------------------------
@overload
def make_client(
    config: EngineConfig | Resolved, *, process: Literal[True], wait: bool = True
) -> EngineClient: ...
@overload
def make_client(
    config: EngineConfig | Resolved, *, process: Literal[False] = False, report: Report = no_report
) -> InlineClient: ...
def make_client(
    config: EngineConfig | Resolved,
    *,
    process: bool = False,
    wait: bool = True,
    report: Report = no_report,
) -> EngineClient:
    """Create an engine in this process, where a caller of `outputs` runs the steps; or in a process of its own. Several
    engines have processes of their own in any case.

    With `wait=False` the child may still be loading: call `wait_ready` before anything else.
    `report` receives the progress of an engine in this process; a child's progress is in `EngineClient.state`.

    Raises:
        ConfigError: the configuration contradicts itself or does not fit this machine.
        StartupError: the child could not start.
    """
    resolved = config if isinstance(config, Resolved) else resolve_config(config)
    check_head(resolved, process)
    if process or len(resolved.config.parallel.ranks) > 1:
        client = start_engines(resolved)
        if wait:
            client.wait_ready()
        return client
    env.limit_spins()
    core, ready = build_core(resolved, report)
    return InlineClient(core, resolved, ready, shut=core.close)


# -- the engine -----------------------------------------------------------------------------------
def build_core(resolved: Resolved, report: Report = no_report) -> tuple[EngineCore, EngineReady]:
    """Build executor and scheduler from a resolved configuration; loads the model before it returns."""
    features = enabled_features(resolved)
    executor = build_executor(resolved, features, report)
    info = msgspec.convert(executor.call("info")[0], WorkerInfo)
    kv_layout = layout(info.layer_specs(), resolved.block_size, info.max_model_len)
    scheduler = build_scheduler(resolved, info, kv_layout, features)
    custom = checked(resolved.config.observe.custom_histogram_buckets)
    core = EngineCore(
        scheduler, executor, resolved.depth, token_bounds=buckets(ITERATION, 0, custom)
    )
    core.check_each_step = bool(env.get("CHECK"))
    core.functions |= rpc.control_calls(core) | sleep.control_calls(core)
    parts = plug_features(features, core, info)
    add_observers(core, resolved, info, kv_layout)
    ready = EngineReady(
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=resolved.block_size,
        vocab_size=int(resolved.hf_config.get("vocab_size") or 0),
        dtype=resolved.dtype,
        device=resolved.device,
        architecture=resolved.architecture,
        model_impl=info.model_impl,
        depth=resolved.depth,
        startup=info.stages,
        pid=os.getpid(),
        version=__version__,
        num_tokens=bool(kv_layout.groups[0].layers) * kv_layout.tokens_in(
            info.num_blocks, info.max_model_len,
            min(resolved.max_num_batched_tokens, info.max_model_len),
        ),
        max_num_seqs=info.max_num_seqs,
        state_bytes=info.state_bytes,
        batch_invariant=info.batch_invariant,
        **parts.ready,
    )  # fmt: skip
    return core, ready


def plug_features(features: Sequence[Feature], core: EngineCore, info: WorkerInfo) -> EngineParts:
    """Add the features' parts to an engine that is complete but for them."""
    shares_states = info.num_checkpoints and core.scheduler.kv.caching
    parts = EngineParts(core, info, CheckpointPool(info.num_checkpoints) if shares_states else None)
    for feature in features:
        feature.plug_into_engine(parts)
    core.scheduler.gates = sorted(parts.gates, key=attrgetter("order"))
    core.scheduler.kv.limits = parts.prefix_limits
    core.counts |= dict.fromkeys(parts.counters, 0.0)
    core.histograms |= parts.histograms
    core.functions |= parts.calls
    core.labels |= parts.labels
    core.state_files |= parts.state_files
    core.listeners += features
    return parts


def add_observers(
    core: EngineCore, resolved: Resolved, info: WorkerInfo, kv_layout: CacheLayout
) -> None:
    """The observers of every engine."""
    if resolved.config.observe.enable_mfu_metrics:
        weights = forecast_weights(resolved.spec, resolved.device, available=1 << 62)
        costs = StepCosts.of(
            resolved.hf_config, info.layer_specs(), weights, ITEMSIZE[resolved.dtype]
        )
        core.observers.add(StepCostCounter(costs, core.counts))
    live = Inspector(
        core.scheduler, core.observers, core.stats, core.depth, kv_layout.bytes_per_block
    )
    core.functions |= live.functions()


def add_process_observers(core: EngineCore, watchdog: Watchdog, folder: Path) -> None:
    """The further observers of an engine that has a process of its own, and a folder; features keep their state beside it."""
    core.observers.add(watchdog)
    for name, keep in core.state_files.items():
        keep(folder.parent / name)
    if env.get("FLIGHT_RECORDER"):
        core.counts["recorder_stops"] = 0.0
        stopped = partial(core.counts.update, recorder_stops=1.0)
        core.observers.add(FlightRecorder(folder, stopped))


def build_scheduler(
    resolved: Resolved, info: WorkerInfo, kv_layout: CacheLayout, features: Sequence[Feature]
) -> Scheduler:
    """The scheduler, without the features' gates."""
    options = resolved.config.scheduler
    kv = KVManager(
        build_pool(resolved, info.num_blocks + 1, len(kv_layout.groups)),
        kv_layout.groups,
        resolved.block_size,
        caching=resolved.prefix_caching and info.prefix_caching,
        hasher=Hasher(
            resolved.block_size,
            name_key(resolved.config.cache.kv_key_file, resolved.config.cache.kv_disk_dir),
            identity=digest_of(kv_facts(resolved, info)),
            algorithm=resolved.config.cache.hash_algorithm,
        ),
    )
    limits = SchedulerLimits(
        max_rows=info.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        max_length=info.max_model_len,
        chunked=resolved.chunked_prefill,
        max_chunk=options.long_prefill_token_threshold,
        depth=resolved.depth,
        by_priority=options.scheduling_policy == "priority",
        max_waiting=options.max_num_queued_reqs or 0,
        max_waiting_tokens=options.max_num_queued_tokens or 0,
    )
    for feature in features:
        limits = feature.limits(limits)
    queues = {f.name: queue for f in features if (queue := f.waiting_queue()) is not None}
    if len(queues) > 1:
        raise ConfigError(
            f"{' and '.join(queues)} both order waiting requests; enable only 1 of them"
        )
    return Scheduler(kv, limits, waiting=next(iter(queues.values()), None))


def build_pool(resolved: Resolved, num_blocks: int, num_groups: int) -> BlockPool:
    observe = resolved.config.observe
    if not observe.kv_cache_metrics:
        return BlockPool(num_blocks, num_groups)
    bounds = buckets("kv_cache_residency", 0, checked(observe.custom_histogram_buckets))
    return ObservedBlockPool(num_blocks, num_groups, bounds, observe.kv_cache_metrics_sample)
