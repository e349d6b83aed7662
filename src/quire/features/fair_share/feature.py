"""FairShareFeature: with API keys that have weights, waiting requests share the engine by tenant."""

from __future__ import annotations

from quire.config.api_key_file import read_keys
from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.features.fair_share.fair_queue import FairQueue


class FairShareFeature(Feature):
    """`api_key_file`. The call `set_weights` replaces the weights of tenants."""

    name = "fair_share"

    def __init__(self, resolved: Resolved):
        super().__init__(resolved)
        self.queue = FairQueue()

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.config.server.api_key_file is not None

    def waiting_queue(self) -> FairQueue:
        path = self.resolved.config.server.api_key_file
        keys = [] if path is None else read_keys(path)
        self.queue.set_weights({key.name: key.weight for key in keys})
        return self.queue

    def plug_into_engine(self, engine: EngineParts) -> None:
        engine.calls["set_weights"] = self.queue.set_weights
