"""PoolingFeature: the model computes vectors or scores of prompts in place of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class PoolingFeature(Feature):
    """A model output in place of the sampler (`output.py`). The loader gives the model its pooler (`models/pooling`)."""

    name = "pooling"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.pooling is not None

    def plug_into_engine(self, engine: EngineParts) -> None:
        if (model := self.resolved.pooling) is not None:
            engine.ready["pooling"] = model.info

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.pooling.output import PooledOutput
        from quire.features.pooling.token_types import TokenTypesHook

        if (model := self.resolved.pooling) is None or not parts.draws:
            return
        parts.model_output = PooledOutput(parts.models[0], parts.rows, model)
        if model.has_token_types:
            parts.hooks.append(TokenTypesHook(parts.platform.device))
