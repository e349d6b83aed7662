"""DataParallelExpertsFeature: engines of data parallelism share the experts (`enable_expert_parallel` with `data_parallel_size`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.config.model_sizes import model_size
from quire.engine.feature import Feature
from quire.protocol.tensor_data import ITEMSIZE
from quire.worker.memory_plan import MemoryLine

if TYPE_CHECKING:
    from quire.parallel.layout import RankLayout
    from quire.worker.build import WorkerParts


class DataParallelExpertsFeature(Feature):
    """A server in each worker, which computes outputs of its experts for the other engines, and a hook that connects the layers."""

    name = "data_parallel_experts"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return bool(resolved.experts_folder) and bool(model_size(resolved.hf_config, "num_experts"))

    def memory(self, layout: RankLayout, stage: int) -> Sequence[MemoryLine]:
        """What the threads of the other engines compute with."""
        from quire.parallel.expert_sockets import MAX_PAIRS

        config, parallel = self.resolved.hf_config, self.resolved.config.parallel
        hidden = model_size(config, "hidden_size")
        inner = model_size(config, "moe_intermediate_size") or model_size(
            config, "intermediate_size"
        )
        one = MAX_PAIRS * (2 * hidden + 3 * inner) * ITEMSIZE[self.resolved.dtype]
        others = parallel.data_parallel_size - 1
        about = f"{others} x {MAX_PAIRS} pairs of a token and an expert"
        return [MemoryLine("outputs of experts for other engines", others * one, about)]

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.data_parallel_experts.hook import ExpertSharingHook

        engine = self.resolved.config.parallel.data_parallel_rank or 0
        rank = parts.ranks.place.tensor
        parts.hooks.append(ExpertSharingHook(self.resolved.experts_folder, engine, rank))
