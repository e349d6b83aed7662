"""A worker's memory plan: forecast from config.json and the headers of the weight files, before anything is loaded; then of the
loaded models, agreed among the ranks.

Knows files and shapes, and the part of them that a rank holds. Rows and block tables are the same in all ranks, so each must
have as many of them as the rank with the least room. `memory_plan.py` divides the memory. Loads torch only to construct models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config.engine import ModelSpec, Resolved
from quire.config.engine_experts import engines_share_experts
from quire.config.model_sizes import model_size
from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import NotEnoughMemory, Unsupported
from quire.kvcache.specs import CacheSpec, WindowSpec
from quire.models.checkpoint_files import TensorHeader, as_loaded, in_memory, stored_tensors
from quire.models.registry import choose_impl, has_states
from quire.models.transformers.modes import check_own_cache
from quire.parallel.layout import ONE_RANK, RankLayout
from quire.parallel.ranks import RankGroups, SingleRank, split_among
from quire.parallel.stages import PipelineStage, within_stage
from quire.platforms.detect import facts
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_plan import GIB, MemoryLine, MemoryPlan, make_plan, size

if TYPE_CHECKING:
    from quire.models.base import CausalLM, LanguageModel

MANY = 1 << 62


class ForecastSpecs(NamedTuple):
    """What the layers of all models keep for requests, and the part of each model's weights that a rank has.

    specs: the cache spec of each layer, of all stages. own: the specs of this rank's stage. states: bytes of one request's
    recurrent states in this stage.
    """

    specs: list[CacheSpec]
    own: range
    states: int
    parts: list[float]


def specs_of(config: dict[str, Any], dtype: str) -> list[CacheSpec]:
    """The cache specs of a model's layers, forecast from config.json; checked again when the layers are built.

    dtype: format of the cached elements (kvcache/specs.py).
    """
    heads = model_size(config, "num_attention_heads", 1)
    hidden = model_size(config, "hidden_size", heads)
    layers = model_size(config, "num_hidden_layers", 1)
    if latent := config.get("kv_lora_rank"):
        return [CacheSpec(1, latent + (config.get("qk_rope_head_dim") or 0), 0, dtype)] * layers
    kv_heads = model_size(config, "num_key_value_heads", heads)
    dim = model_size(config, "head_dim", max(hidden // heads, 1))
    full = CacheSpec(kv_heads, dim, config.get("v_head_dim") or dim, dtype)
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if not window or not kinds:
        return [full] * layers
    narrow = WindowSpec(kv_heads, dim, full.v_head_dim, dtype, window)
    return [narrow if kind == "sliding_attention" else full for kind in kinds]


def loaded_tensors(
    found: Iterable[TensorHeader] | int, spec: ModelSpec, device: str
) -> Iterable[TensorHeader] | int:
    """The tensors as a model gets them, before `--quantization`."""
    keeps_codes = device == "cpu" and spec.dtype == "bfloat16" and spec.quantization is None
    return as_loaded(found, spec.stored, keeps_codes)


def forecast_weights(
    spec: ModelSpec, device: str, available: int, found: Iterable[TensorHeader] | int | None = None
) -> int:
    """The bytes of the weights in memory, from the headers of their files, or from `found`.

    Raises:
        NotEnoughMemory: the weights do not fit before they are quantized.
        ModelNotFound, ConfigError: as `models.checkpoint_files.stored_tensors`.
    """
    if found is None:
        found = stored_tensors(spec.path, spec.hf_config, spec.load.load_format)
    loaded = loaded_tensors(found, spec, device)
    loading = in_memory(loaded, ITEMSIZE[spec.dtype])
    if spec.quantization is None:
        return loading
    # An accelerator gets one weight after the other, and each is quantized at once; so are decoded weights.
    if loading > available and device == "cpu" and loaded is found:
        raise NotEnoughMemory(
            f"Not enough memory: quantizing to {spec.quantization} first loads the weights as {spec.dtype},"
            f" which takes {size(loading)}, but {size(available)} is available. Use a quantized checkpoint."
        )
    small_head = device == "cpu"  # on an accelerator the head is not quantized
    return in_memory(loaded, ITEMSIZE[spec.dtype], spec.quantization, small_head=small_head)


def plan_memory(
    resolved: Resolved,
    others: Sequence[ModelSpec] = (),
    layout: RankLayout | None = None,
    stage: int = 0,
    found: ForecastSpecs | None = None,
    lines: Sequence[MemoryLine] = (),
) -> MemoryPlan:
    """The plan of a rank before anything is loaded, from config.json and the headers of the weight files.

    `others`: the models of the worker beside the main one: of the last stage only. `layout`: None: the configured one. `found`:
    of this stage, if it is known. `lines`: what features take.
    """
    machine, cache = facts(), resolved.config.cache
    layout = layout or RankLayout.of(resolved.config.parallel)
    offloaded = 0 if resolved.device == "cpu" else int(cache.cpu_offload_gb * GIB)
    engines = resolved.config.parallel.share[1] if resolved.device == "cpu" else 1
    here = max(1, layout.size // resolved.config.parallel.nnodes)
    available = machine.available_bytes // (here * engines)  # they share this machine
    whole = forecast_weights(resolved.spec, resolved.device, machine.available_bytes + offloaded)
    specs, own, states, parts = found or forecast_specs(resolved, others, layout, stage)
    weights = max(0, int(whole * parts[0]) - offloaded)
    for spec, part in zip(others, parts[1:], strict=False):  # the last stage has others
        if spec.path != resolved.path:  # MTP layers are counted
            weights += int(forecast_weights(spec, resolved.device, available - weights) * part)
    sizes = weights, machine.total_bytes, available
    return make_plan(resolved, *sizes, specs, others, states, lines, own)


def forecast_specs(
    resolved: Resolved,
    others: Sequence[ModelSpec] = (),
    layout: RankLayout | None = None,
    stage: int = 0,
) -> ForecastSpecs:
    """What the layers of all models keep, and which part of the models a rank has.

    From config.json alone for whole models that only have attention; others are constructed, without weights.
    """
    layout = layout or RankLayout.of(resolved.config.parallel)
    specs: list[CacheSpec] = []
    parts: list[float] = []
    own, states = range(0), 0
    for spec, cut in [(resolved.spec, layout), *((each, layout.of_one_stage) for each in others)]:
        cacheless = spec.pooling is not None and not spec.pooling.causal
        stateful = has_states(spec.architecture, spec.hf_config, spec.options.model_impl)
        shares = engines_share_experts(spec.parallel)
        if not (layout.size > 1 or cacheless or stateful or shares):
            specs += specs_of(spec.hf_config, resolved.kv_dtype_for(spec.dtype))
            parts.append(1.0)
            continue
        first = layout.pipeline - cut.pipeline  # the last stage has the other models
        for number in range(cut.pipeline):
            model, start = construct_part(spec, cut, number), len(specs)
            specs += layer_specs(resolved, [model], [spec])
            if first + number == stage:
                own = range(own.start if own else start, len(specs))
                states += state_bytes_of([model])
                parts.append(part_of_weights(model, spec, cut))
    return ForecastSpecs(specs, own if layout.pipeline > 1 else range(len(specs)), states, parts)


def layer_specs(
    resolved: Resolved, models: Sequence[Any], model_specs: Sequence[ModelSpec]
) -> list[CacheSpec]:
    """The cache spec of each layer of the models; if the main model keeps its own cache, its forecast remains.

    Raises:
        Unsupported: such a model is configured with another cache format.
    """
    dtype = resolved.kv_dtype
    if any(model.per_request for model in models):
        check_own_cache(resolved.dtype, dtype, resolved.architecture)
    specs = [
        layer.spec.cache_spec(resolved.kv_dtype_for(spec.dtype))
        for model, spec in zip(models, model_specs, strict=True)
        for layer in model.attention_layers()
    ]
    if specs or not models[0].per_request:
        return specs
    return specs_of(resolved.hf_config, dtype)


def state_bytes_of(models: Sequence[Any]) -> int:
    """Bytes of one request's recurrent states, in all layers of the models."""
    return sum(layer.state_spec().num_bytes for model in models for layer in model.state_layers())


def construct_part(spec: ModelSpec, layout: RankLayout = ONE_RANK, stage: int = 0) -> CausalLM:
    """The part of a native model that the first rank of a stage has, on "meta"; the whole model, if there is one rank, or ranks
    do not split it.

    Raises:
        Unsupported: the model has no native class, or its layers cannot be in several stages.
    """
    layout = layout if spec.is_split else ONE_RANK
    impl, reason = choose_impl(spec.architecture, spec.hf_config, spec.options.model_impl)
    if layout.size > 1 and impl != "native":
        tensor, pipeline = layout.tensor, layout.pipeline
        raise Unsupported(
            f"tensor_parallel_size={tensor} and pipeline_parallel_size={pipeline} for {spec.architecture}, which runs as {impl}"
            f" ({reason})",
            "use 1",
        )
    from quire.models.base import CausalLM
    from quire.models.construction import construct, model_class

    if layout.pipeline > 1 and not issubclass(model_class(spec.architecture), CausalLM):
        what = (
            f"pipeline_parallel_size={layout.pipeline} for {spec.architecture}, which is an encoder"
        )
        raise Unsupported(what, "use 1")
    ranks = SingleRank(0, layout.tensor) if layout.tensor > 1 else None
    with split_among(ranks), within_stage(PipelineStage(stage, layout)):
        model = construct(spec)
    if layout.prefill > 1 and (why := _why_not_split(spec, model)):
        about = f"prefill_context_parallel_size={layout.prefill} for {spec.architecture}, {why}"
        raise Unsupported(about, "use 1, or tensor_parallel_size")
    return model


def _why_not_split(spec: ModelSpec, model: CausalLM) -> str:
    """Why ranks cannot compute parts of a prompt each; empty: they can."""
    if spec.pooling is not None and not spec.pooling.causal:
        return "whose tokens attend to later ones"
    return "whose recurrent layers compute a prompt in order" if model.state_layers() else ""


def part_of_weights(own: CausalLM, spec: ModelSpec, layout: RankLayout) -> float:
    """How much of a model's weights are in `own`, the part of a rank: of the numbers, in whatever format they are stored."""
    if not spec.is_split or (layout.size == 1 and not engines_share_experts(spec.parallel)):
        return 1.0
    models = own, construct_part(replace(spec, parallel=ParallelConfig()))
    part, whole = (sum(each.numel() for each in model.parameters()) for model in models)
    return part / whole


def plan_loaded(
    resolved: Resolved,
    models: Sequence[LanguageModel],
    others: Sequence[ModelSpec],
    forecast: MemoryPlan,
    found: ForecastSpecs,
    ranks: RankGroups,
) -> tuple[list[CacheSpec], MemoryPlan]:
    """The cache specs of all layers, of other stages too; and the plan.

    `forecast`: what else is known of memory. `found`: what the layers were expected to keep.

    Raises:
        NotEnoughMemory: as `make_plan`.
        RankLost: another rank has ended.
    """
    from quire.quantization.apply import weight_bytes

    specs, own = list(found.specs), found.own
    specs[own.start : own.stop] = layer_specs(resolved, models, (resolved.spec, *others))
    sizes = agreed_sizes(ranks, sum(weight_bytes(model) for model in models), forecast)
    states, stage = state_bytes_of(models), None if ranks.stages is None else own
    plan = make_plan(resolved, *sizes, specs, others, states, forecast.lines, stage)
    return specs, agreed_plan(ranks, plan)


def agreed_sizes(ranks: RankGroups, weights: int, forecast: MemoryPlan) -> tuple[int, int, int]:
    """Bytes of the weights, and of the machine's memory, in all and available: the least favourable among the ranks of a
    stage, so that all make the same plan."""
    numbers = [-weights, forecast.total, forecast.available]
    for group in (ranks.tensor, ranks.context):
        if group is not None:
            numbers = group.least(numbers)
    return -numbers[0], numbers[1], numbers[2]


def agreed_plan(ranks: RankGroups, plan: MemoryPlan) -> MemoryPlan:
    """The plan with the limits of the stage that has the least room."""
    if ranks.stages is None:
        return plan
    checkpoints = plan.num_checkpoints if plan.state_bytes else MANY
    blocks, length, rows, checkpoints = ranks.stages.least(
        [plan.num_blocks, plan.max_model_len, plan.max_num_seqs, checkpoints]
    )
    return replace(
        plan, num_blocks=blocks, max_model_len=length, max_num_seqs=rows,
        num_checkpoints=0 if checkpoints == MANY else checkpoints,
    )  # fmt: skip
