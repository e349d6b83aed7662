"""PipelineFeature: the plans in flight share the requests, so that each stage of a pipeline computes."""

from __future__ import annotations

from dataclasses import replace

from quire.config.engine import Resolved
from quire.engine.feature import EngineParts, Feature
from quire.features.pipeline.gate import PipelineGate
from quire.scheduler.limits import SchedulerLimits


class PipelineFeature(Feature):
    """`pipeline_parallel_size` above 1. How stages compute is the worker's (`worker/stage_worker.py`)."""

    name = "pipeline"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return resolved.config.parallel.pipeline_parallel_size > 1

    def limits(self, limits: SchedulerLimits) -> SchedulerLimits:
        """The stages before the last would wait for a token that is not drawn yet."""
        return replace(limits, run_ahead=False)

    def plug_into_engine(self, engine: EngineParts) -> None:
        engine.gates.append(PipelineGate(self.resolved.depth, self.resolved.chunked_prefill))
