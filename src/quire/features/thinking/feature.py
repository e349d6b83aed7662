"""ThinkingFeature: a request may limit the tokens that a model thinks (`thinking_token_budget`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.engine.feature import Feature

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class ThinkingFeature(Feature):
    """A logits processor in each worker that draws."""

    name = "thinking"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.pooling is None

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.thinking.budget import ThinkingBudget

        if parts.draws:
            parts.processors.append(ThinkingBudget())
