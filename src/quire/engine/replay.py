"""Replay: runs a flight recording on another executor.

Knows recordings and the worker protocol. Does not know where the executor comes from (`cli/replay.py` builds it). KV
from before the recording is computed first, by additional plans without a recorded result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.engine.flight_recorder import Recording
from quire.protocol.plan import EnteredRow, StepPlan, StepResult, WorkItem
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.executor.base import Executor


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step, as recorded and as replayed."""

    plan: StepPlan
    recorded: StepResult | None
    """None: the engine died, or the step failed."""
    result: StepResult | None
    error: BaseException | None

    @property
    def differs(self) -> bool:
        """Whether the same plan had another result."""
        if self.recorded is None or self.result is None:
            return self.recorded is not self.result
        return self.recorded.tokens != self.result.tokens


def replay(recording: Recording, executor: Executor, budget: int) -> Iterator[Replayed]:
    """Run the recording step by step; ends at the first step that fails.

    Args:
        budget: the most tokens of a step (max_num_batched_tokens).
    """
    recorded = {f.step: f for f in recording.frames if isinstance(f, StepResult)}
    start = recording.start
    if start.rows:
        for plan in _compute(start.rows, start.done, [], budget):
            executor.launch(plan).result()
    for plan in (f for f in recording.frames if isinstance(f, StepPlan)):
        if resumed := [new for new in plan.entered if new.num_computed_tokens]:
            done = [new.num_computed_tokens for new in resumed]
            fresh = [msgspec.structs.replace(new, num_computed_tokens=0) for new in resumed]
            for prefill in _compute(fresh, done, plan.freed_rows, budget):
                executor.launch(prefill).result()
            freed_rows = [new.row for new in resumed]
            replayed_plan = msgspec.structs.replace(plan, freed_rows=freed_rows)
        else:
            replayed_plan = plan
        try:
            result, error = executor.launch(replayed_plan).result(), None
        except Exception as why:
            result, error = None, why
        yield Replayed(plan, recorded.get(plan.step), result, error)
        if error is not None:
            return


def _compute(
    rows: list[EnteredRow], done: list[int], freed_rows: list[int], budget: int
) -> Iterator[StepPlan]:
    """Plans that enter these rows and compute the first `done` tokens of each.

    Steps that were in flight when the recording began drew tokens that it does not contain. They are drawn again here.
    """
    computed, entered = {new.row: 0 for new in rows}, rows
    while entered or any(computed[new.row] < end for new, end in zip(rows, done, strict=True)):
        work, room = [], budget
        for new, end in zip(rows, done, strict=True):
            start = computed[new.row]
            # no later token exists before the next draw
            num_known = max(len(new.tokens), start + 1)
            if n := min(min(end, num_known) - start, room):
                work.append(WorkItem(new.row, n, samples=isinstance(new.params, SamplingParams)))
                computed[new.row], room = start + n, room - n
        yield StepPlan(0, entered, work, freed_rows)
        entered, freed_rows = [], []
