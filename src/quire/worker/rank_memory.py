"""What one rank holds of a model that several ranks share. Knows shapes. Loads torch only to construct models, without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config.engine import ModelSpec
from quire.config.engine_experts import engines_share_experts
from quire.config.parallel.parallel_config import ParallelConfig
from quire.errors import Unsupported
from quire.models.registry import choose_impl
from quire.parallel.layout import ONE_RANK, RankLayout
from quire.parallel.ranks import LoneRank, split_among
from quire.parallel.stages import PipelineStage, within_stage

if TYPE_CHECKING:
    from quire.models.base import CausalLM


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
    ranks = LoneRank(0, layout.tensor) if layout.tensor > 1 else None
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
