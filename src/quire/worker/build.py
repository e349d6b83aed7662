"""Builds a worker from a configuration: memory plan, model, KV cache, rows, sampler, hooks.

Knows every part of a worker, and loads torch only when it builds one. Knows no feature by name: the caller's features plug
their parts in (`WorkerFeature`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.config.engine import ModelSpec, Resolved
from quire.kvcache.specs import CacheSpec, CrossAttentionSpec
from quire.logging import get_logger
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import RankAddress
from quire.parallel.ranks import RankGroups, split_among
from quire.parallel.stages import within_stage
from quire.platforms.cpu_affinity import bind_to_cores
from quire.plugins import load_plugins
from quire.startup_timer import Report, StartupStages, no_report, table
from quire.worker.memory_forecast import ForecastSpecs, forecast_specs, plan_loaded, plan_memory
from quire.worker.memory_plan import GIB, MemoryLine, MemoryPlan, make_plan
from quire.worker.worker_info import WorkerInfo, fields_of

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.models.offload import Offload
    from quire.native.step import NativeStep
    from quire.platforms.base import Platform
    from quire.worker.hooks import Hook
    from quire.worker.input_batch import InputBatchBuilder
    from quire.worker.model_input import ModelInput
    from quire.worker.model_runner import ModelOutput, ModelRunner
    from quire.worker.request_rows import RequestRows
    from quire.worker.row_states import RowStates
    from quire.worker.sampling.logits_processors import Processor
    from quire.worker.sampling.sampler_ops import SamplerOps
    from quire.worker.worker import Worker

log = get_logger(__name__)
ALONE, ALL = RankAddress(), RankGroups()


@dataclass
class WorkerParts:
    """The parts of a worker that is being built; features add theirs.

    Attributes:
        states: recurrent states of the rows, and their checkpoints.
        models: the main model, then those that features asked for. The list is the worker's: after a sleep it has other
            models.
        model_input: a feature may replace it, or wrap it.
        processors: logits processors; they run in ascending `Processor.order`. At first the user's processors.
        hooks: the worker calls them in ascending `Hook.order`.
        functions: further functions of the worker.
        model_output: what becomes of hidden states; None: the sampler draws tokens. One feature at most sets it.
        places: by feature, the places of its models in `models`, and in what `Hook.use_models` gets.
        ranks: this worker among the ranks of its engine.
        runners: what runs the other models.
        has_user_processors: some of the processors are the user's.
    """

    platform: Platform
    models: list[LanguageModel]
    model_input: ModelInput
    rows: RequestRows
    states: RowStates
    processors: list[Processor]
    hooks: list[Hook] = field(default_factory=list)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    model_output: ModelOutput | None = None
    places: dict[str, slice] = field(default_factory=dict)
    ranks: RankGroups = ALL
    runners: list[ModelRunner] = field(default_factory=list)
    has_user_processors: bool = False

    @property
    def draws(self) -> bool:
        """Whether this worker draws tokens: other stages than the last only compute hidden states."""
        return self.ranks.stage.is_last


class WorkerFeature(Protocol):
    """What a worker asks a feature for: the part of `engine/feature.py` that is the worker's."""

    @property
    def name(self) -> str: ...
    def models(self) -> Sequence[ModelSpec]: ...
    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]: ...
    def plug_into_worker(self, parts: WorkerParts) -> None: ...


def build_worker(
    resolved: Resolved,
    features: Sequence[WorkerFeature] = (),
    report: Report = no_report,
    address: RankAddress = ALONE,
) -> Worker:
    """Plan memory, load the models, allocate their KV cache: one device, ready to run plans.

    `report`: receives the progress. `address`: of this rank, if several split the model.

    Raises:
        NotEnoughMemory, ConfigError: before anything is loaded. ConfigError: a feature does not work with the model.
        Unsupported: a device or a model that is not supported yet.
    """
    stages = StartupStages(report)
    load_plugins()
    bind_to_cores(resolved.device == "cpu", *resolved.config.parallel.place_on_machine(*address.local))  # fmt: skip
    with stages("planning memory"):
        place = address.layout, address.place.stage
        others, places = further_models(features)
        found = forecast_specs(resolved, others, *place)
        if address.place.stage < address.layout.pipeline - 1:
            others, places = [], {}  # the last stage has them
        lines = [line for feature in features for line in feature.memory(*place)]
        forecast = plan_memory(resolved, others, *place, found, lines)
    with stages("importing torch"):
        from quire.attention.base import load_backend
        from quire.parallel.ranks import use_same_threads
        from quire.platforms.base import platform_of
        from quire.worker.kv_cache import allocate_kv_cache
        from quire.worker.module_hooks import ModuleHooks, extended_worker
        from quire.worker.page_prefault import KVPagePrefaulter
        from quire.worker.row_states import RowStates
        from quire.worker.sleep import WorkerSleep

        platform = platform_of(resolved.device)
        if resolved.attention_backend is not None:
            load_backend(resolved.attention_backend)  # an error now, not after loading
        platform.prepare(forecast.weights)
        ranks = address.join()
        forecast = plan_on(platform, resolved, forecast, others, found)
    _compile_kernels(resolved.device, stages)
    with stages("loading the model"):
        models = build_models(resolved, platform, others, stages.loaded, ranks)
    with stages("allocating the KV cache"):
        specs, plan = plan_loaded(resolved, models, others, forecast, found, ranks)
        use_same_threads(ranks)
        if not (ranks.place.part or ranks.place.tensor):
            of_stage = f" of stage {ranks.place.stage}" * bool(ranks.stages)
            log.info("memory plan%s\n%s", of_stage, table(plan.table()))
        resolved = replace(resolved, max_num_seqs=plan.max_num_seqs)
        states = RowStates(resolved.max_num_seqs, plan.num_checkpoints, plan.num_drafts)
        with_caches = (resolved, platform, (resolved.spec, *others), plan, states, ranks.blocks)
        storages = allocate_kv_cache(models, *with_caches)
    batcher = build_batcher(resolved, platform, plan)
    platform.check_room(plan.activations)
    rows, model = batcher.rows, models[0]
    parts = build_parts(resolved, platform, plan, models, (rows, states), ranks, places)
    plug_in(features, parts)
    output, fast_step = build_output(resolved, platform, parts)
    step_blocks = -(-resolved.max_num_batched_tokens // resolved.block_size)
    pages = KVPagePrefaulter(plan.num_blocks + 1, step_blocks)
    pages.begin(storages)
    hooks = sorted([*build_state_hooks(states, rows), *parts.hooks, pages], key=attrgetter("order"))
    worker = worker_class(resolved, ranks)(
        platform, model, parts.model_input, output, hooks, rows, batcher,
        functions=parts.functions, models=models, fast_step=fast_step, runners=parts.runners,
    )  # fmt: skip
    info = describe(model, specs, plan, stages, ranks)
    worker.functions["info"] = lambda: msgspec.to_builtins(info)
    WorkerSleep(
        worker, storages, states, platform.device,
        load=partial(build_models, platform=platform, ranks=ranks), specs=(resolved, others),
        allocate=lambda models: allocate_kv_cache(models, *with_caches),
        on_cache_reset=pages.begin,
    )  # fmt: skip
    extension = resolved.config.parallel.worker_extension_cls
    ModuleHooks(worker, extended_worker(worker, address.rank, address.local[0], extension))
    return worker


def _compile_kernels(device: str, stages: StartupStages) -> None:
    if device == "cpu":
        from quire.ops.cpu.bindings import compile_missing

        compile_missing(stages)


def plug_in(features: Sequence[WorkerFeature], parts: WorkerParts) -> None:
    """Add the features' parts. Processors are in order afterwards, in the list that features may have kept."""
    for feature in features:
        feature.plug_into_worker(parts)
    parts.processors.sort(key=attrgetter("order"))


def further_models(
    features: Sequence[WorkerFeature],
) -> tuple[list[ModelSpec], dict[str, slice]]:
    """The models of features, and the places that each feature's have after the main model."""
    specs: list[ModelSpec] = []
    places = {}
    for feature in features:
        start = 1 + len(specs)
        specs += feature.models()
        places[feature.name] = slice(start, 1 + len(specs))
    return specs, places


def worker_class(resolved: Resolved, ranks: RankGroups) -> Callable[..., Worker]:
    """What makes the worker: of a stage, if there are several."""
    from quire.worker.stage_worker import StageWorker
    from quire.worker.worker import Worker

    if ranks.stages is None:
        return Worker
    has_own_engine = resolved.executor == "external_launcher"
    return partial(StageWorker, link=ranks.stages, answers=has_own_engine)


def build_parts(
    resolved: Resolved,
    platform: Platform,
    plan: MemoryPlan,
    models: list[LanguageModel],
    rows_and_states: tuple[RequestRows, RowStates],
    ranks: RankGroups,
    places: dict[str, slice],
) -> WorkerParts:
    """The parts of a worker before features add theirs."""
    from quire.worker.sampling.load_processors import load_processors

    model_input = build_model_input(resolved, platform, plan, models[0], ranks)
    rows, states = rows_and_states
    parts = WorkerParts(platform, models, model_input, rows, states, [], places=places, ranks=ranks)
    if parts.draws:
        names = resolved.config.model.logits_processors
        parts.processors = load_processors(
            names, resolved, platform.device, rows, models[0].vocab_size
        )
        parts.has_user_processors = bool(parts.processors)
    return parts


def build_state_hooks(states: RowStates, rows: RequestRows) -> list[Hook]:
    """What acts on recurrent states around a step."""
    from quire.worker.state_hook import StateHook
    from quire.worker.state_rollback import StateRollback

    hooks: list[Hook] = [StateHook(states)] if states.layers else []
    return [*hooks, StateRollback(states, rows)] if hooks and states.num_drafts else hooks


def build_output(
    resolved: Resolved, platform: Platform, parts: WorkerParts
) -> tuple[ModelOutput, NativeStep | None]:
    """The model output, and the fast path: the native step, which draws only tokens."""
    from quire.native.step import make_native_step
    from quire.worker.sampling.sampler import Sampler
    from quire.worker.stage_worker import StageOutput

    model, rows = parts.models[0], parts.rows
    output, sampler = parts.model_output, None
    if not parts.draws and (link := parts.ranks.stages) is not None:
        output = StageOutput(model, rows, link)
    elif output is None:
        mode, ops = resolved.config.model.logprobs_mode, build_sampler_ops(platform)
        output = sampler = Sampler(model, rows, mode, parts.processors, ops=ops)
    return output, make_native_step(rows, sampler) if "native" in platform.kernels else None


def describe(
    model: LanguageModel,
    specs: Sequence[CacheSpec],
    plan: MemoryPlan,
    stages: StartupStages,
    ranks: RankGroups,
) -> WorkerInfo:
    from quire.worker.batch_invariance import is_batch_invariant

    shares_prefixes = model.supports_prefix_caching and (
        plan.num_checkpoints > 0 or not plan.state_bytes
    )
    shares_prefixes &= all(layer.spec.causal for layer in model.attention_layers())
    shares, invariant = ranks.least([int(shares_prefixes), int(is_batch_invariant(model))])
    return WorkerInfo(
        specs=[fields_of(spec) for spec in specs],
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        model_impl=model.description,
        prefix_caching=bool(shares),
        state_bytes=plan.states,
        num_checkpoints=plan.num_checkpoints,
        stages=stages.done,
        batch_invariant=bool(invariant),
    )


def build_models(
    resolved: Resolved,
    platform: Platform,
    others: Sequence[ModelSpec],
    report: Report = no_report,
    ranks: RankGroups = ALL,
) -> list[LanguageModel]:
    """The main model and the others, with their weights: this rank's parts."""
    from quire.models.load import add_whole_heads, build_model

    offload = build_offload(resolved, platform)
    with split_among(ranks.tensor), within_stage(ranks.stage):
        models = [build_model(resolved.spec, platform, offload, report)]
    for spec in others:
        with split_among(ranks.tensor if spec.is_split else None):
            models.append(build_model(spec, platform))
    add_whole_heads(models[0], resolved.spec, platform)
    report("loading the model", 1.0)
    return models


def build_offload(resolved: Resolved, platform: Platform) -> Offload | None:
    """Which weights stay in host memory."""
    if not resolved.config.cache.cpu_offload_gb:
        return None
    if (copier := platform.copier()) is None:
        log.warning("cpu_offload_gb has no effect: weights are in host memory on this device")
        return None
    from quire.models.offload import Offload

    return Offload(copier, int(resolved.config.cache.cpu_offload_gb * GIB))


def plan_on(
    platform: Platform,
    resolved: Resolved,
    forecast: MemoryPlan,
    others: Sequence[ModelSpec],
    found: ForecastSpecs,
) -> MemoryPlan:
    """Repeat the plan with the device's own numbers: the forecast does not know what else uses the device's memory."""
    from quire.platforms.base import Memory

    # A row needs its tokens and, for each group, two block tables: a permanent one, and one for the running step.
    groups = len(forecast.layout.groups)
    blocks = -(-forecast.max_model_len // resolved.block_size) + 1
    tables = 4 * resolved.max_num_seqs * (forecast.max_model_len + 2 * groups * blocks)
    now = platform.plannable(Memory(forecast.total, forecast.available), tables)
    sizes = forecast.weights, now.total, now.available
    specs, own, states, _ = found
    return make_plan(resolved, *sizes, specs, others, states, forecast.lines, own)


def build_batcher(resolved: Resolved, platform: Platform, plan: MemoryPlan) -> InputBatchBuilder:
    """The builder and its rows. An accelerator keeps its own tables, and the host sends only the changes."""
    from quire.worker.input_batch import InputBatchBuilder
    from quire.worker.request_rows import RequestRows

    lengths = resolved.max_num_seqs, plan.max_model_len
    sizes = (*lengths, len(plan.layout.groups), resolved.block_size)
    encoder_lens = {
        number: group.spec.max_encoder_len
        for number, group in enumerate(plan.layout.groups)
        if isinstance(group.spec, CrossAttentionSpec)
    }
    if "triton" not in platform.kernels:
        return InputBatchBuilder(RequestRows(*sizes, platform.device, encoder_lens))
    from quire.worker.device_rows import DeviceInputBatchBuilder, DeviceRows

    return DeviceInputBatchBuilder(DeviceRows(*sizes, platform.device, encoder_lens))


def build_sampler_ops(platform: Platform) -> SamplerOps:
    """The sampler's functions: kernels, if the platform has them."""
    if "triton" in platform.kernels:
        from quire.worker.sampling.triton_ops import TRITON_OPS

        return TRITON_OPS
    from quire.ops.cpu.bindings import best
    from quire.worker.sampling.cpu_ops import cpu_ops
    from quire.worker.sampling.sampler_ops import TORCH_OPS

    kernels = best() if "native" in platform.kernels else None
    return TORCH_OPS if kernels is None else cpu_ops(kernels)


def build_model_input(
    resolved: Resolved, platform: Platform, plan: MemoryPlan, model: Any, ranks: RankGroups = ALL
) -> ModelInput:
    """The model input; steps of single tokens replay graphs if device, backend and model allow it."""
    if ranks.context is not None:
        from quire.worker.context_parallel import ContextModelInput

        return ContextModelInput(model, ranks.context)
    from quire.worker.graphs import GraphModelInput, default_sizes
    from quire.worker.model_input import TokenModelInput

    model_input, capturer = TokenModelInput(model), platform.graph_capturer()
    layers = model.attention_layers()
    capturable = model.capturable and (layers or model.state_layers())
    capturable = capturable and all(layer.backend.can.graphs for layer in layers[:1])
    capturable = capturable and not any(layer.spec.max_encoder_len for layer in layers)
    if capturer is None or not capturable or resolved.config.parallel.enforce_eager:
        return model_input
    max_blocks = -(-(plan.max_model_len + 1) // resolved.block_size)
    requested = {int(size) for size in resolved.config.parallel.cudagraph_capture_sizes}
    sizes = [size for size in requested if size <= resolved.max_num_seqs]
    sizes = sizes or default_sizes(resolved.max_num_seqs)
    return GraphModelInput(
        model_input, capturer, sizes, max_blocks, plan.max_model_len, null_row=resolved.max_num_seqs
    )
