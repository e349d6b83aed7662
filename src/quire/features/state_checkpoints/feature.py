"""StateCheckpointsFeature: requests to a model with recurrent states share prefixes."""

from __future__ import annotations

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.features.state_checkpoints.gate import CheckpointGate


class StateCheckpointsFeature(Feature):
    """A gate if the worker has room for checkpoints. The hook is the worker's (`worker/state_hook.py`): it also clears states."""

    name = "state_checkpoints"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.prefix_caching

    def plug_into_engine(self, engine: EngineParts) -> None:
        if (pool := engine.checkpoints) is None:
            return
        resolved = self.resolved
        places = resolved.block_size, resolved.checkpoint_boundary, resolved.checkpoint_interval
        junctions = resolved.config.cache.enable_mamba_shared_prefix_checkpoint
        gate = CheckpointGate(pool, *places, junctions, counts=engine.core.counts)
        engine.gates.append(gate)
        engine.prefix_limits.append(gate)
