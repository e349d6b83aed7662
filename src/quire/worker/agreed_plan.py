"""The memory plan of loaded models, on which all ranks agree.

Knows what a rank has loaded, and the exchanges with the others. Rows and block tables are the same in all ranks, so each must
have as many of them as the rank with the least room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config.engine import ModelSpec, Resolved
from quire.kvcache.specs import CacheSpec
from quire.parallel.ranks import Ranks
from quire.quantization.apply import weight_bytes
from quire.worker.forecast import ForecastSpecs, layer_specs, state_bytes_of
from quire.worker.memory_plan import MemoryPlan, make_plan

if TYPE_CHECKING:
    from quire.models.base import LanguageModel

MANY = 1 << 62


def plan_loaded(
    resolved: Resolved,
    models: Sequence[LanguageModel],
    others: Sequence[ModelSpec],
    forecast: MemoryPlan,
    found: ForecastSpecs,
    ranks: Ranks,
) -> tuple[list[CacheSpec], MemoryPlan]:
    """The cache specs of all layers, of other stages too; and the plan.

    `forecast`: what else is known of memory. `found`: what the layers were expected to keep.

    Raises:
        NotEnoughMemory: as `make_plan`.
        RankLost: another rank has ended.
    """
    specs, own = list(found.specs), found.own
    specs[own.start : own.stop] = layer_specs(resolved, models, (resolved.spec, *others))
    sizes = agreed_sizes(ranks, sum(weight_bytes(model) for model in models), forecast)
    states, stage = state_bytes_of(models), None if ranks.stages is None else own
    plan = make_plan(resolved, *sizes, specs, others, states, forecast.lines, stage)
    return specs, agreed_plan(ranks, plan)


def agreed_sizes(ranks: Ranks, weights: int, forecast: MemoryPlan) -> tuple[int, int, int]:
    """Bytes of the weights, and of the machine's memory, in all and available: the least favourable among the ranks of a
    stage, so that all make the same plan."""
    numbers = [-weights, forecast.total, forecast.available]
    for group in (ranks.tensor, ranks.context):
        if group is not None:
            numbers = group.least(numbers)
    return -numbers[0], numbers[1], numbers[2]


def agreed_plan(ranks: Ranks, plan: MemoryPlan) -> MemoryPlan:
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
