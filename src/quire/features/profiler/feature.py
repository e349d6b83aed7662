"""ProfilerFeature: `start_profile` and `stop_profile` record steps of each worker (`profiler_config`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.engine import Resolved
from quire.config.profiler import profiler_options
from quire.engine.feature import Feature

if TYPE_CHECKING:
    from quire.worker.build import WorkerParts


class ProfilerFeature(Feature):
    """A hook and two functions of each worker."""

    name = "profiler"

    @classmethod
    def enabled(cls, resolved: Resolved) -> bool:
        return profiler_options(resolved.config.observe.profiler_config).profiler is not None

    def plug_into_worker(self, parts: WorkerParts) -> None:
        from quire.features.profiler.recorder import StepRecorder

        place = parts.ranks.place
        recorder = StepRecorder(
            profiler_options(self.resolved.config.observe.profiler_config),
            f"rank{place.stage}.{place.part}.{place.tensor}",
        )
        parts.hooks.append(recorder)
        parts.functions |= {"start_profile": recorder.start, "stop_profile": recorder.stop}
