"""ResumedRequestsFeature: requests that ran when a process of the engine died go on in this one, one at a time.

The frontend sends them (`engine/unfinished_request.py`): the prompt, and the tokens that it has received.
"""

from __future__ import annotations

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.features.resumed_requests.gate import COUNTER, ResumedRequestsGate


class ResumedRequestsFeature(Feature):
    """`resume`, unless it is off."""

    name = "resumed_requests"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.config.scheduler.resume != "off"

    def plug_into_engine(self, engine: EngineParts) -> None:
        gate = ResumedRequestsGate(engine.core.counts)
        engine.gates.append(gate)
        engine.counters.append(COUNTER)
        engine.state_files[COUNTER] = gate.count_on
