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
    seated = recording.seated
    if seated.rows:
        for plan in _compute(seated.rows, seated.done, [], budget):
            executor.launch(plan).result()
    for plan in (f for f in recording.frames if isinstance(f, StepPlan)):
        if known := [new for new in plan.entered if new.computed]:
            done = [new.computed for new in known]
            fresh = [msgspec.structs.replace(new, computed=0) for new in known]
            for before in _compute(fresh, done, plan.left, budget):
                executor.launch(before).result()
            left = [new.row for new in known]
            now = msgspec.structs.replace(plan, left=left)
        else:
            now = plan
        try:
            result, error = executor.launch(now).result(), None
        except Exception as why:
            result, error = None, why
        yield Replayed(plan, recorded.get(plan.step), result, error)
        if error is not None:
            return


def _compute(
    rows: list[EnteredRow], done: list[int], left: list[int], budget: int
) -> Iterator[StepPlan]:
    """Plans that enter these rows and compute the first `done` tokens of each, without draws."""
    entered, togo = rows, dict(zip((new.row for new in rows), done, strict=True))
    while entered or any(togo.values()):
        work, room = [], budget
        for row, tokens in togo.items():
            if n := min(tokens, room):
                work.append(WorkItem(row, n, samples=False))
                togo[row], room = tokens - n, room - n
        yield StepPlan(0, entered, work, left)
        entered, left = [], []
