"""The composition root: from a configuration to a running engine. The only file that decides which features are on.

Knows every package by name, but imports one only to build from it: the HTTP process, which calls
`make_client(process=True)`, uses this file without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from quire import __version__, env
from quire.config.api_key_file import read_keys
from quire.config.engine import EngineConfig, Resolved
from quire.config.resolve import resolve
from quire.config.serialize import resolved_from_bytes, resolved_to_bytes
from quire.config.structured import structured_options
from quire.config.validate import check_wishes
from quire.engine import inspector, mfu, rpc, sleep
from quire.engine.client import InlineClient
from quire.engine.core import EngineCore
from quire.engine.memory_plan import GIB, MemoryPlan, layer_specs, make_plan, plan_memory, specs_of
from quire.engine.process_client import ProcessClient
from quire.engine.startup_timer import StartupStages, table
from quire.engine.supervisor import EngineSupervisor, RestartPolicy
from quire.features.structured.compiler import GrammarCompiler
from quire.features.structured.gate import GrammarGate
from quire.features.structured.vocabulary import Vocabulary, tokenizer_json
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_metrics import ObservedBlockPool
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.layout import CacheLayout, layout
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.logging import get_logger
from quire.models import hf_config
from quire.observe.buckets import buckets, checked
from quire.platforms.cpu_affinity import bind_to_cores
from quire.platforms.detect import facts
from quire.plugins import load_plugins
from quire.protocol.output import EngineReady
from quire.scheduler.fair_queue import FairQueue
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.executor.base import Executor
    from quire.models.offload import Offload
    from quire.platforms.base import Platform
    from quire.worker.input_batch import InputBatchBuilder
    from quire.worker.model_input import ModelInput
    from quire.worker.sampling.sampler_ops import SamplerOps
    from quire.worker.worker import Worker

log = get_logger(__name__)


class WorkerFacts(msgspec.Struct):
    """What a built worker reports: everything that the engine must know about it."""

    # for each layer the fields of its spec; window 0: no window
    specs: list[tuple[int, int, int, str, int]]
    num_blocks: int
    max_model_len: int
    model_impl: str
    prefix_caching: bool
    stages: list[tuple[str, float]]

    def layer_specs(self) -> list[CacheSpec]:
        return [
            WindowSpec(*spec[:4], window=spec[4]) if spec[4] else CacheSpec(*spec[:4])
            for spec in self.specs
        ]


# -- public ---------------------------------------------------------------------------------------
@overload
def make_client(
    config: EngineConfig, *, process: Literal[True], wait: bool = True
) -> ProcessClient: ...
@overload
def make_client(config: EngineConfig, *, process: Literal[False] = False) -> InlineClient: ...
def make_client(
    config: EngineConfig, *, process: bool = False, wait: bool = True
) -> InlineClient | ProcessClient:
    """Create an engine in this process, where a caller of `outputs` runs the steps; or in a process of its own.

    With `wait=False` the child may still be loading: call `wait_ready` before anything else.

    Raises:
        ConfigError: the configuration contradicts itself or does not fit this machine.
        StartupError: the child could not start.
    """
    stages = StartupStages()
    with stages("read the configuration"):
        resolved = resolve_config(config)
    if process:
        host = EngineSupervisor(resolved_to_bytes(resolved), patience=patience())
        client = ProcessClient(resolved, host.folder, host.board, host)
        if wait:
            client.wait_ready()
        return client
    core, ready = build_core(resolved, stages)
    return InlineClient(core, resolved, ready, shut=core.executor.close)


def patience() -> RestartPolicy:
    return RestartPolicy(
        heartbeat=float(env.get("HEARTBEAT_TIMEOUT_S")),
        start=float(env.get("ENGINE_READY_TIMEOUT_S")),
        restarts=int(env.get("MAX_ENGINE_RESTARTS")),
    )


def resolve_config(config: EngineConfig) -> Resolved:
    """Find the checkpoint, read its config.json, resolve every "auto"."""
    check_wishes(config)
    load_plugins()
    path = hf_config.locate(config.model, config.load)
    return resolve(config, path, hf_config.read_config(path, config.model.hf_overrides), facts())


# -- the engine -----------------------------------------------------------------------------------
def build_core(
    resolved: Resolved, stages: StartupStages | None = None
) -> tuple[EngineCore, EngineReady]:
    """Build executor and scheduler from a resolved configuration; loads the model before it returns."""
    stages = stages or StartupStages()
    compiler = build_compiler(resolved)
    executor = build_executor(resolved, compiler)
    about = msgspec.convert(executor.call("facts")[0], WorkerFacts)
    cut = layout(about.layer_specs(), resolved.block_size, about.max_model_len)
    gate = GrammarGate(compiler, elsewhere=resolved.executor == "mp")
    scheduler = build_scheduler(resolved, about, cut, [gate])
    core = EngineCore(scheduler, executor, resolved.depth)
    gate.wake = lambda: core.inbox.put(None)
    if resolved.asked.observe.enable_mfu_metrics:
        mfu.count(core, resolved, about.layer_specs())
    core.check_each_step = bool(env.get("CHECK"))
    core.functions |= rpc.functions(core) | sleep.functions(core)
    core.functions |= inspector.functions(core, cut.bytes_per_block)
    ready = EngineReady(
        max_model_len=about.max_model_len,
        num_blocks=about.num_blocks,
        block_size=resolved.block_size,
        vocab_size=int(resolved.hf_config.get("vocab_size") or 0),
        dtype=resolved.dtype,
        device=resolved.device,
        architecture=resolved.architecture,
        model_impl=about.model_impl,
        depth=resolved.depth,
        startup=stages.done + about.stages,
        pid=os.getpid(),
        version=__version__,
        num_tokens=cut.tokens_in(
            about.num_blocks, about.max_model_len,
            min(resolved.max_num_batched_tokens, about.max_model_len),
        ),
    )  # fmt: skip
    return core, ready


def build_compiler(resolved: Resolved) -> GrammarCompiler:
    """The grammar compiler: one for each process that compiles, so the gate and an inline worker share it."""
    asked = resolved.asked.model
    folder = hf_config.locate_tokenizer(resolved.path, asked, resolved.asked.load)
    size = int(resolved.hf_config.get("vocab_size") or 0)
    compiler = GrammarCompiler(Vocabulary(tokenizer_json(folder), size))
    if not asked.skip_tokenizer_init and (Path(folder) / "tokenizer.json").is_file():
        other = (
            structured_options(resolved.asked.structured.structured_outputs_config).backend
            == "xgrammar"
        )
        compiler.warm(other)  # while weights load; later it would delay running requests
    return compiler


def build_scheduler(
    resolved: Resolved, about: WorkerFacts, cut: CacheLayout, gates: Sequence[Gate]
) -> Scheduler:
    asked = resolved.asked.scheduler
    caching = resolved.prefix_caching and about.prefix_caching
    kv = KVManager(
        build_pool(resolved, about.num_blocks + 1, len(cut.groups)),
        cut.groups,
        resolved.block_size,
        caching=caching,
        hasher=Hasher(resolved.block_size, kept=resolved.kv_dtype),
    )
    limits = SchedulerLimits(
        max_rows=resolved.max_num_seqs,
        max_step_tokens=resolved.max_num_batched_tokens,
        max_length=about.max_model_len,
        chunked=resolved.chunked_prefill,
        max_chunk=asked.long_prefill_token_threshold,
        depth=resolved.depth,
        by_priority=asked.scheduling_policy == "priority",
        max_waiting=asked.max_num_queued_reqs or 0,
        max_waiting_tokens=asked.max_num_queued_tokens or 0,
    )
    waiting = None
    if (path := resolved.asked.server.api_key_file) is not None:
        waiting = FairQueue({key.name: key.weight for key in read_keys(path)})
    return Scheduler(kv, limits, gates, waiting=waiting)


def build_pool(resolved: Resolved, num_blocks: int, num_groups: int) -> BlockPool:
    observe = resolved.asked.observe
    if not observe.kv_cache_metrics:
        return BlockPool(num_blocks, num_groups)
    bounds = buckets("kv_cache_residency", 0, checked(observe.custom_histogram_buckets))
    return ObservedBlockPool(num_blocks, num_groups, bounds, observe.kv_cache_metrics_sample)


# -- the worker -----------------------------------------------------------------------------------
def build_executor(resolved: Resolved, compiler: GrammarCompiler) -> Executor:
    if resolved.executor == "mp":
        from quire.executor.process import ProcessExecutor

        return ProcessExecutor(
            "quire.engine.assemble:worker_from_wire", resolved_to_bytes(resolved)
        )
    from quire.executor.inline import InlineExecutor

    return InlineExecutor(build_worker(resolved, compiler))


def worker_from_wire(payload: bytes) -> Worker:
    resolved = resolved_from_bytes(payload)
    return build_worker(resolved, build_compiler(resolved))


def build_worker(resolved: Resolved, compiler: GrammarCompiler) -> Worker:
    """Plan memory, load the model, allocate its KV cache: one device, ready to run plans.

    Raises:
        NotEnoughMemory: before anything is loaded.
        Unsupported: a device or a model that is not supported yet.
    """
    stages = StartupStages()
    load_plugins()
    with stages("plan memory"):
        forecast = plan_memory(resolved)
    bind_to_cores(computing=resolved.device == "cpu")
    with stages("import torch"):
        from quire.features.structured.masks import GrammarMasks
        from quire.models.load import build_model
        from quire.platforms.base import platform_of
        from quire.quantization.apply import bytes_held
        from quire.worker.module_hooks import ModuleHooks
        from quire.worker.native_step import make_native_step
        from quire.worker.page_prefault import KVPagePrefaulter
        from quire.worker.sampling.load_processors import load_processors
        from quire.worker.sampling.sampler import Sampler
        from quire.worker.sampling.thinking_budget import ThinkingBudget
        from quire.worker.sleep import WorkerSleep
        from quire.worker.worker import Worker

        platform = platform_of(resolved.device)
        platform.prepare(forecast.weights)
        forecast = plan_on(platform, resolved, forecast)
    with stages("load the model"):
        model = build_model(resolved, platform, build_offload(resolved, platform))
    with stages("allocate the KV cache"):
        specs = layer_specs(resolved, model)
        plan = replan(resolved, forecast, bytes_held(model), specs)
        log.info("memory plan\n%s", table(plan.table()))
        storages = hand_out_cache(resolved, platform, model, plan)
    batcher = build_batcher(resolved, platform, plan)
    platform.check_room(plan.activations)
    rows, asked = batcher.rows, resolved.asked.model
    processors = load_processors(asked.logits_processors, resolved, platform.device)
    jumps = structured_options(resolved.asked.structured.structured_outputs_config).jumps
    masks = GrammarMasks(compiler, rows, jumps and not processors)
    processors += [ThinkingBudget(), masks]
    drawing = build_drawing(platform)
    sampler = Sampler(model, rows, asked.logprobs_mode, processors, drawing=drawing)
    model_input = build_model_input(resolved, platform, plan, model)
    step = -(-resolved.max_num_batched_tokens // resolved.block_size)
    pages = KVPagePrefaulter(plan.num_blocks + 1, step)
    pages.begin(storages)
    at_once = make_native_step(rows, sampler) if "native" in platform.kernels else None
    hooks = [masks.hook, pages]
    worker = Worker(platform, model, model_input, sampler, hooks, rows, batcher, at_once=at_once)
    about = WorkerFacts(
        specs=[_flat(spec) for spec in specs],
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        model_impl=getattr(model, "description", "native"),
        prefix_caching=getattr(model, "supports_prefix_caching", True),
        stages=stages.done,
    )
    worker.functions["facts"] = lambda: msgspec.to_builtins(about)
    WorkerSleep(
        worker, storages, platform.device,
        load=lambda: build_model(resolved, platform, build_offload(resolved, platform)),
        equip=lambda model: hand_out_cache(resolved, platform, model, plan),
        begun=pages.begin,
    )  # fmt: skip
    ModuleHooks(worker)
    return worker


def build_offload(resolved: Resolved, platform: Platform) -> Offload | None:
    """Which weights stay in host memory."""
    if not resolved.asked.cache.cpu_offload_gb:
        return None
    if (copier := platform.copier()) is None:
        log.warning("cpu_offload_gb does nothing here: weights are in the host's memory as it is")
        return None
    from quire.models.offload import Offload

    return Offload(copier, int(resolved.asked.cache.cpu_offload_gb * GIB))


def plan_on(platform: Platform, resolved: Resolved, forecast: MemoryPlan) -> MemoryPlan:
    """Repeat the plan with the device's own numbers: the forecast does not know what else uses the device's memory."""
    from quire.platforms.base import Memory

    specs = specs_of(resolved.hf_config, resolved.kv_dtype)
    # A row needs its tokens and, for each group, two block tables: a permanent one, and one for the running step.
    groups = len(forecast.layout.groups)
    blocks = -(-forecast.max_model_len // resolved.block_size) + 1
    tables = 4 * resolved.max_num_seqs * (forecast.max_model_len + 2 * groups * blocks)
    now = platform.plannable(Memory(forecast.total, forecast.available), tables)
    return make_plan(resolved, forecast.weights, now.total, now.available, specs)


def replan(
    resolved: Resolved, forecast: MemoryPlan, weights: int, specs: list[CacheSpec]
) -> MemoryPlan:
    """Repeat the plan with the actual size of the weights and the layers' own cache specs."""
    return make_plan(resolved, weights, forecast.total, forecast.available, specs)


def build_batcher(resolved: Resolved, platform: Platform, plan: MemoryPlan) -> InputBatchBuilder:
    """The builder and its rows. An accelerator keeps its own tables, and the host sends only the changes."""
    from quire.worker.input_batch import InputBatchBuilder
    from quire.worker.request_rows import RequestRows

    lengths = resolved.max_num_seqs, plan.max_model_len
    sizes = (*lengths, len(plan.layout.groups), resolved.block_size)
    if "triton" not in platform.kernels:
        return InputBatchBuilder(RequestRows(*sizes, platform.device))
    from quire.worker.device_rows import DeviceInputBatchBuilder, DeviceRows

    return DeviceInputBatchBuilder(DeviceRows(*sizes, platform.device))


def build_drawing(platform: Platform) -> SamplerOps:
    """The sampler's functions: kernels, if the platform has them."""
    if "triton" in platform.kernels:
        from quire.worker.sampling.triton_ops import COMPILED

        return COMPILED
    from quire.ops.cpu.bindings import best
    from quire.worker.sampling.cpu_ops import native
    from quire.worker.sampling.sampler_ops import PLAIN

    kernels = best() if "native" in platform.kernels else None
    return PLAIN if kernels is None else native(kernels)


def build_model_input(
    resolved: Resolved, platform: Platform, plan: MemoryPlan, model: Any
) -> ModelInput:
    """The model input; steps of single tokens replay graphs if device, backend and model allow it."""
    from quire.worker.graphs import GraphModelInput, default_sizes
    from quire.worker.model_input import TokenModelInput

    model_input, recorder = TokenModelInput(model), platform.recorder()
    layers = model.attention_layers()
    able = model.recordable and layers and layers[0].backend.can.graphs
    if recorder is None or not able or resolved.asked.parallel.enforce_eager:
        return model_input
    most = -(-(plan.max_model_len + 1) // resolved.block_size)
    wanted = {int(size) for size in resolved.asked.parallel.cudagraph_capture_sizes}
    sizes = [size for size in wanted if size <= resolved.max_num_seqs]
    sizes = sizes or default_sizes(resolved.max_num_seqs)
    return GraphModelInput(model_input, recorder, sizes, most, plan.max_model_len)


def hand_out_cache(resolved: Resolved, platform: Any, model: Any, plan: MemoryPlan) -> Any:
    """Choose a backend that supports every layer, and give each layer its part of the cache. Returns the storages."""
    from quire.attention.base import Needs, choose
    from quire.worker.kv_cache import allocate_cache

    layers = model.attention_layers()
    if not layers:
        return []
    needs = Needs.of(
        layers,
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        block_size=resolved.block_size,
    )
    _, backend = choose(resolved.attention_backend, platform.attention, needs)
    groups = plan.layout.groups
    return allocate_cache(
        model, groups, plan.num_blocks + 1, resolved.block_size, backend, platform
    )


def _flat(spec: CacheSpec) -> tuple[int, int, int, str, int]:
    window = spec.window if isinstance(spec, WindowSpec) else 0
    return spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.dtype, window
