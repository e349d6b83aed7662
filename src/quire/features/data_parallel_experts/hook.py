"""ExpertSharingHook: connects the mixture layers of a worker's models with the same layers of other engines.

Knows models and the layers whose experts engines share. Does not know steps: a step that needs experts of another engine asks for
them in its layers, and a thread answers questions of others at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from quire.layers.engine_experts import EngineExperts
from quire.layers.moe import Experts
from quire.models.base import LanguageModel
from quire.parallel.expert_sockets import ExpertClient, ExpertServer, socket_path
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook


class ExpertSharingHook(Hook):
    """See above.

    Args:
        folder: of the sockets. engine, rank: of this worker.
    """

    name = "data_parallel_experts"
    order = 50

    def __init__(self, folder: str, engine: int, rank: int):
        self.server = ExpertServer(socket_path(folder, engine, rank))
        self.client = ExpertClient(lambda other: socket_path(folder, other, rank))

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """Answer with the experts of these models; with none while the worker is asleep."""
        layers = [
            layer
            for model in models
            if isinstance(model, nn.Module)
            for layer in model.modules()
            if isinstance(layer, Experts) and isinstance(layer.split, EngineExperts)
        ]
        for number, layer in enumerate(layers):
            if isinstance(layer.split, EngineExperts):
                layer.split.layer, layer.split.others = number, self.client
        self.server.layers = [layer.outputs_of_seats for layer in layers]

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """It has no part in a step."""
        return True
