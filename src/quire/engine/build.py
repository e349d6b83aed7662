"""Builds an engine from a configuration: scheduler, executor, core, client. The one file that decides which features are on.

Loads torch only where it builds a worker (`worker/build.py`): the HTTP process, which calls `make_client(process=True)`,
uses this file without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, overload

import msgspec

from quire import env
from quire.config.api_key_file import read_keys
from quire.config.engine import EngineConfig, Resolved
from quire.config.nodes import check_head
from quire.engine import lora, rpc, sleep
from quire.engine.client import EngineClient, InlineClient
from quire.engine.core import EngineCore
from quire.engine.engine_processes import start_engines
from quire.engine.flight_recorder import FlightRecorder
from quire.engine.resolve import resolve_config
from quire.engine.worker_parts import build_compiler, build_executor
from quire.features.fair_share.fair_queue import FairQueue
from quire.features.lora.gate import LoraGate
from quire.features.lora.registry import FILE as ADAPTERS_FILE
from quire.features.lora.registry import LoraRegistry
from quire.features.pipeline.gate import PipelineGate
from quire.features.speculation.gate import SpeculationGate
from quire.features.state_checkpoints.gate import CheckpointGate
from quire.features.structured.gate import GrammarGate
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_metrics import ObservedBlockPool
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.checkpoints import CheckpointPool
from quire.kvcache.layout import CacheLayout, layout
from quire.kvcache.manager import KVManager
from quire.observe.buckets import buckets, checked
from quire.observe.inspector import Inspector
from quire.observe.metric_table import ITERATION, STATES
from quire.observe.mfu import StepCostCounter, StepCosts
from quire.processes.watchdog import Watchdog
from quire.protocol.output import EngineReady
from quire.protocol.tensor_data import ITEMSIZE
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.startup_timer import Report, no_report
from quire.version import __version__
from quire.worker.build import WorkerInfo
from quire.worker.forecast import forecast_weights


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
    `report` receives the progress of an engine in this process; that of a child is in `EngineClient.state`.

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
    core, ready = build_core(resolved, report)
    return InlineClient(core, resolved, ready, shut=core.executor.close)


# -- the engine -----------------------------------------------------------------------------------
def build_core(resolved: Resolved, report: Report = no_report) -> tuple[EngineCore, EngineReady]:
    """Build executor and scheduler from a resolved configuration; loads the model before it returns."""
    compiler = build_compiler(resolved)
    executor = build_executor(resolved, compiler, report)
    info = msgspec.convert(executor.call("info")[0], WorkerInfo)
    kv_layout = layout(info.layer_specs(), resolved.block_size, info.max_model_len)
    gate = GrammarGate(compiler, elsewhere=resolved.executor in ("mp", "ray"), waits=resolved.executor == "external_launcher")  # fmt: skip
    speculation = build_speculation(resolved)
    gates = [gate, *speculation, *build_pipeline(resolved)]
    scheduler = build_scheduler(resolved, info, kv_layout, gates)
    custom = checked(resolved.config.observe.custom_histogram_buckets)
    core = EngineCore(
        scheduler, executor, resolved.depth, token_bounds=buckets(ITERATION, 0, custom)
    )
    gate.wake = lambda: core.inbox.put(None)
    for limit in scheduler.kv.limits:
        limit.counts = core.counts
    for drafts in speculation:
        drafts.publish(core.counts)
    core.check_each_step = bool(env.get("CHECK"))
    core.functions |= rpc.functions(core) | sleep.functions(core)
    if isinstance(scheduler.waiting, FairQueue):
        core.functions["set_weights"] = scheduler.waiting.set_weights
    add_adapters(core, resolved)
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
        pooling=None if resolved.pooling is None else resolved.pooling.info,
    )  # fmt: skip
    return core, ready


def add_adapters(core: EngineCore, resolved: Resolved) -> None:
    """Serve LoRA adapters, if the configuration says so, and load those that it names."""
    options = resolved.config.lora
    if not options.enable_lora:
        return
    registry = LoraRegistry(
        core.executor.call,
        options.capacity,
        wake=lambda: core.inbox.put(None),
        awake=lambda: core.state == STATES[0],
    )
    gate = LoraGate(registry, options.max_loras)
    core.scheduler.gates.append(gate)
    core.labels |= gate.labels()
    core.functions |= lora.functions(core, registry)
    core.state_files[ADAPTERS_FILE] = registry.persist
    lora.load_configured(registry, resolved.config)


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
    resolved: Resolved, info: WorkerInfo, kv_layout: CacheLayout, gates: Sequence[Gate]
) -> Scheduler:
    options = resolved.config.scheduler
    caching = resolved.prefix_caching and info.prefix_caching
    checkpoints = build_checkpoints(resolved, info) if caching else []
    kv = KVManager(
        build_pool(resolved, info.num_blocks + 1, len(kv_layout.groups)),
        kv_layout.groups,
        resolved.block_size,
        caching=caching,
        hasher=Hasher(resolved.block_size, element_format=resolved.kv_dtype),
        limits=checkpoints,
    )
    limits = SchedulerLimits(
        max_rows=info.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        max_length=info.max_model_len,
        chunked=resolved.chunked_prefill,
        max_chunk=options.long_prefill_token_threshold,
        drafts=resolved.num_drafts,
        lookahead=resolved.num_drafts if resolved.draft else 0,
        depth=resolved.depth,
        # The stages before the last would wait for a token that is not drawn yet.
        run_ahead=resolved.config.parallel.pipeline_parallel_size == 1,
        by_priority=options.scheduling_policy == "priority",
        max_waiting=options.max_num_queued_reqs or 0,
        max_waiting_tokens=options.max_num_queued_tokens or 0,
    )
    waiting = None
    if (path := resolved.config.server.api_key_file) is not None:
        waiting = FairQueue({key.name: key.weight for key in read_keys(path)})
    return Scheduler(kv, limits, [*gates, *checkpoints], waiting=waiting)


def build_speculation(resolved: Resolved) -> list[SpeculationGate]:
    if (options := resolved.speculation) is None:
        return []
    return [SpeculationGate(resolved.num_drafts, options.shares_texts)]


def build_pipeline(resolved: Resolved) -> list[PipelineGate]:
    """What fills the stages of a pipeline."""
    several = resolved.config.parallel.pipeline_parallel_size > 1
    return [PipelineGate(resolved.depth, resolved.chunked_prefill)] if several else []


def build_checkpoints(resolved: Resolved, info: WorkerInfo) -> list[CheckpointGate]:
    """What lets a model with recurrent states share prefixes; nothing for other models."""
    if not info.num_checkpoints:
        return []
    places = resolved.block_size, resolved.checkpoint_boundary, resolved.checkpoint_interval
    junctions = resolved.config.cache.enable_mamba_shared_prefix_checkpoint
    return [CheckpointGate(CheckpointPool(info.num_checkpoints), *places, junctions)]


def build_pool(resolved: Resolved, num_blocks: int, num_groups: int) -> BlockPool:
    observe = resolved.config.observe
    if not observe.kv_cache_metrics:
        return BlockPool(num_blocks, num_groups)
    bounds = buckets("kv_cache_residency", 0, checked(observe.custom_histogram_buckets))
    return ObservedBlockPool(num_blocks, num_groups, bounds, observe.kv_cache_metrics_sample)
