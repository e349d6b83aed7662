"""ShardedStateFeature: `collective_rpc("save_sharded_state", ...)` writes the checkpoint of a running engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.feature import Feature

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class ShardedStateFeature(Feature):
    """A function of each worker. The first one writes for all, since each rank reads whole tensors."""

    name = "sharded_state"

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.models.sharded_state import save_sharded_state

        spec, place = self.resolved.spec, parts.ranks.place
        is_first = not (place.stage or place.part or place.tensor)

        def save(path: str, pattern: str | None = None, max_size: int | None = None) -> None:
            if is_first:
                save_sharded_state(spec.path, path, pattern, max_size, spec.load.load_format)

        parts.functions["save_sharded_state"] = save
