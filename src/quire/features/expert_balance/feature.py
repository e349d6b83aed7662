"""ExpertBalanceFeature: experts move between ranks, by the tokens that they had (`enable_eplb`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.config.model_sizes import model_size
from quire.config.parallel.experts import eplb_options
from quire.engine.feature import Feature

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class ExpertBalanceFeature(Feature):
    """A hook in each worker."""

    name = "expert_balance"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return eplb_options(resolved.config.parallel) is not None

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.expert_balance.hook import ExpertBalanceHook

        config = self.resolved.config.parallel
        if (options := eplb_options(config)) is None:
            return
        nodes = max(1, config.tensor_parallel_size * config.nnodes // config.world_size)
        groups = model_size(self.resolved.hf_config, "n_group", 1)
        parts.hooks.append(ExpertBalanceHook(options, nodes=nodes, groups=groups))
