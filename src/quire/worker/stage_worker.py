"""The worker of one stage of a pipeline: the last one announces what it drew, and the others learn it before they need it.

Knows plans, rows and the link of the stages. The model hands hidden states over (`models/base.py`). A stage needs the tokens of
a step when a later plan computes a row that drew then; so it may run ahead of the last stage with other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from torch import Tensor

from quire.forward_context import ForwardBatch
from quire.models.base import LanguageModel
from quire.parallel.stages import StageLink
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.worker.request_rows import ReportedCount, RequestRows
from quire.worker.worker import FinishedStep, QueuedStep, Worker


class AnnouncedTokens(msgspec.Struct, array_like=True):
    """What a step drew, and the forced tokens behind it; as in `StepResult`."""

    step: int
    tokens: list[list[int]]
    forced_tokens: dict[int, list[int]]


class StageOutput:
    """The model output of a stage that is not the last: it draws nothing, and waits for no other stage."""

    def __init__(self, model: LanguageModel, rows: RequestRows, link: StageLink):
        self.model, self.rows, self.link = model, rows, link
        # by step: index of the work item, row, its count of known tokens, and the position of the token
        self.unknown: dict[int, list[tuple[int, int, ReportedCount, int]]] = {}

    def enter(self, new: EnteredRow) -> None:
        """Nothing of a request's parameters matters here."""

    def leave(self, row: int) -> None:
        """As `enter`."""

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return False

    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> QueuedStep:
        counts = self.rows.reported_counts
        self.unknown[plan.step] = [
            (item, row, counts[row], position) for item, row, position in batch.first_draws()
        ]
        return FinishedStep(StepResult(plan.step, [[] for _ in plan.work]))

    def learn(self, rows: Iterable[int]) -> None:
        """Write what the last stage has announced into the rows. Waits until the tokens of these rows are known.

        Raises:
            RankLost: the last stage has ended, or does not draw in time.
        """
        needed = {id(self.rows.reported_counts[row]) for row in rows}
        while self.unknown:
            draws = (draw for step in self.unknown.values() for draw in step)
            waits = any(id(count) in needed for _, _, count, _ in draws)
            if (data := self.link.announced(waits)) is None:
                return
            self._write(msgspec.msgpack.decode(data, type=AnnouncedTokens))

    def _write(self, announced: AnnouncedTokens) -> None:
        for item, row, count, position in self.unknown.pop(announced.step):
            if tokens := announced.tokens[item]:
                count.count = position + len(tokens)
                if self.rows.reported_counts[row] is count:  # else another request has the row
                    self.rows.write_tokens(row, position, tokens)
            if forced := announced.forced_tokens.get(item):
                self.rows.append_forced(row, count, forced)


class StageWorker(Worker):
    """A worker of one stage. `link`: with the other stages."""

    def __init__(self, *args: Any, link: StageLink, **options: Any):
        self.link = link
        super().__init__(*args, **options)

    def run(self, plan: StepPlan) -> QueuedStep:
        """As `Worker.run`. Raises StepFailed: another stage has ended, too."""
        self.link.step = plan.step
        if isinstance(self.model_output, StageOutput):
            self.model_output.learn(item.row for item in plan.work)
            return super().run(plan)
        step = super().run(plan)
        return AnnouncedStep(step, self.link) if plan.work else step


class AnnouncedStep:
    """A queued step of the last stage, whose tokens the other stages learn."""

    def __init__(self, step: QueuedStep, link: StageLink):
        self._step, self._link = step, link

    def result(self) -> StepResult:
        result = self._step.result()
        tokens = AnnouncedTokens(result.step, result.tokens, result.forced_tokens)
        self._link.announce(msgspec.msgpack.encode(tokens))
        return result
