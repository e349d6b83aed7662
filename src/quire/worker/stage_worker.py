"""The worker of one stage of a pipeline: the last one announces what it drew, and the others learn it before they need it.

Knows plans, rows, their draft tokens, and the link of the stages. The model hands hidden states over (`models/base.py`). A stage
needs the tokens of a step when a later plan computes a row that drew then; so it may run ahead of the last stage with other rows.
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
from quire.protocol.tensor_data import decode_tensor, encode_tensor
from quire.worker.model_runner import QueuedStep
from quire.worker.request_rows import RequestRows
from quire.worker.worker import FinishedStep, Worker


class AnnouncedStep(msgspec.Struct, array_like=True):
    """A step of the last stage: its tokens, or all of its result; and the rows' draft tokens, by work item."""

    result: StepResult
    drafts: dict[int, list[int]]


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_tensor)
_decoder = msgspec.msgpack.Decoder(AnnouncedStep, dec_hook=decode_tensor)


class StageOutput:
    """The model output of a stage that is not the last: it draws nothing, and waits for no other stage.

    Attributes:
        unknown: by step: index of the work item, row, how many requests had taken the row, and the position of the token.
        results: of the steps whose result is read here; None: it is not announced yet.
    """

    def __init__(self, model: LanguageModel, rows: RequestRows, link: StageLink):
        self.model, self.rows, self.link = model, rows, link
        self.unknown: dict[int, list[tuple[int, int, int, int]]] = {}
        self.results: dict[int, StepResult | None] = {}

    def enter(self, new: EnteredRow) -> None:
        """Nothing of a request's parameters matters here."""

    def leave(self, row: int) -> None:
        """As `enter`."""

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        return False

    def finish(self, plan: StepPlan, batch: ForwardBatch, hidden_TD: Tensor) -> QueuedStep:
        entered = self.rows.num_entered
        self.unknown[plan.step] = [
            (item, row, entered[row], position) for item, row, position in batch.first_draws()
        ]
        return FinishedStep(StepResult(plan.step, [[] for _ in plan.work]))

    def learn(self, rows: Iterable[int]) -> None:
        """Write what the last stage has announced into the rows. Waits until the tokens of these rows are known.

        Raises:
            RankLost: the last stage has ended, or does not draw in time.
        """
        needed = {(row, self.rows.num_entered[row]) for row in rows}
        while self.unknown:
            draws = (draw for step in self.unknown.values() for draw in step)
            if not self._receive(wait=any((row, number) in needed for _, row, number, _ in draws)):
                return

    def result(self, step: int) -> StepResult:
        """What the last stage announced of a step of `results`. Raises: as `learn`."""
        while (found := self.results[step]) is None:
            self._receive(wait=True)
        del self.results[step]
        return found

    def _receive(self, wait: bool) -> bool:
        """Write the next announced step into the rows; False: nothing has come yet."""
        if (data := self.link.announced(wait)) is None:
            return False
        announced = _decoder.decode(data)
        result, rows = announced.result, self.rows
        if result.step in self.results:
            self.results[result.step] = result
        for item, row, number, position in self.unknown.pop(result.step):
            if rows.num_entered[row] != number:
                continue  # another request has the row
            if tokens := result.tokens[item]:
                rows.write_tokens(row, position, tokens)
                rows.take_back(row, position + len(tokens))
            if drafts := announced.drafts.get(item):
                rows.put_drafts(row, drafts)
        return True


class StageWorker(Worker):
    """A worker of one stage.

    Args:
        link: with the other stages.
        answers: the results of every stage are read, not only the last stage's.
    """

    def __init__(self, *args: Any, link: StageLink, answers: bool = False, **options: Any):
        self.link, self.answers = link, answers
        super().__init__(*args, **options)

    def run(self, plan: StepPlan) -> QueuedStep:
        """As `Worker.run`."""
        self.link.step = plan.step
        output = self.model_output
        if isinstance(output, StageOutput):
            output.learn(item.row for item in plan.work)
        step = super().run(plan)
        if not plan.work:
            return step
        if not isinstance(output, StageOutput):
            return DrawnStep(step, plan, self.rows, self.link, self.answers)
        if not self.answers:
            return step
        step.result()  # before the announcement counts its tokens
        output.results[plan.step] = None
        return LearnedStep(output, plan.step)


class DrawnStep:
    """A queued step of the last stage, which the other stages learn. `whole`: its result, too."""

    def __init__(
        self, step: QueuedStep, plan: StepPlan, rows: RequestRows, link: StageLink, whole: bool
    ):
        self._step, self._plan, self._rows = step, plan, rows
        self._link, self._whole = link, whole

    def result(self) -> StepResult:
        result = self._step.result()
        rows = (self._rows.drafts_of(item.row) for item in self._plan.work)
        drafts = {index: found for index, found in enumerate(rows) if found}
        tokens = StepResult(result.step, result.tokens)
        announced = AnnouncedStep(result if self._whole else tokens, drafts)
        self._link.announce(_encoder.encode(announced))
        return result


class LearnedStep:
    """A queued step of another stage, whose result the last one announces."""

    def __init__(self, output: StageOutput, step: int):
        self._output, self._step = output, step

    def result(self) -> StepResult:
        return self._output.result(self._step)
