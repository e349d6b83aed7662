"""SpeculationHook: after each step it puts draft tokens into the rows that drew a token.

Knows rows, a drafter and what a step accepted. Does not know how draft tokens are verified (`worker/sampling/sampler.py`),
nor how a drafter guesses.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.features.speculation.controller import SpeculationController
from quire.features.speculation.draft_sync import DraftSync
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.features.speculation.gate import NAME, DraftReport
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.parallel.ranks import RankGroup
    from quire.protocol.plan import EnteredRow, WorkItem
    from quire.worker.request_rows import RequestRows
    from quire.worker.sampling.logits_processors import Processor


IDLE_STEPS = 64
"""Steps after which the hook looks whether a drafter that sleeps should wake up."""


class SpeculationHook(Hook):
    """The draft tokens are in the rows before the engine plans the next step of these rows.

    Args:
        controller: how many draft tokens each row gets.
        max_drafts_at: the most draft tokens of a row, by the number of rows that draw.
        names_requests: report the ids of requests, beside the counts of their draft tokens.
        processors: logits processors that may cut or replace draft tokens (`Processor.look_ahead`).
        ranks: the ranks that split the model; they take the same draft tokens.
        waits: the result of a step is read before the next one runs. Draft tokens are proposed then, so that they follow the
            tokens that hooks added to the step. Else they are proposed when the step is queued.
        models: where the drafter's models are among the worker's models.
    """

    name = NAME
    order = 70

    def __init__(
        self,
        rows: RequestRows,
        drafter: Drafter,
        controller: SpeculationController,
        max_drafts_at: Callable[[int], int],
        names_requests: bool = False,
        processors: Sequence[Processor] = (),
        ranks: RankGroup | None = None,
        waits: bool = False,
        models: slice = slice(1, None),
    ):
        self.rows, self.drafter, self.controller = rows, drafter, controller
        self.max_drafts_at = max_drafts_at
        self.agree = None if ranks is None else DraftSync(ranks, controller.max_drafts)
        self.names_requests, self.processors, self.waits = names_requests, processors, waits
        self.models = models
        # Of steps whose results are not read yet: the rows that drew, and the report.
        self.reports: deque[tuple[list[int], DraftReport]] = deque()
        self._requests: dict[int, EnteredRow] = {}  # by row
        self._entered: dict[int, EnteredRow] = {}  # requests that the drafter does not know yet
        self._scopes: dict[int, bytes] = {}  # by row, from plans
        self._sleeps = False  # the drafter knows no request
        self._step = 0  # the number of the last plan
        self._known: dict[int, int] = {}  # by row: tokens that the drafter knows
        self._wanted: dict[int, int] = {}  # by row: the most draft tokens that its request wants
        self._drafted: set[int] = set()  # rows that may have draft tokens, as the gate knows
        self._verified: dict[int, tuple[int, int]] = {}  # by row: length before, draft tokens
        self._looked = 0.0  # when the last step's draft tokens were there; 0: no request ran since
        self._decodes = True  # the last step computed no prompt tokens
        self._model: LanguageModel | None = None
        self._batch: ForwardBatch | None = None
        self._computed: ComputedTokens | None = None

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self._model = models[0]
        self.drafter.use_models([models[0], *models[self.models]])

    def enter(self, new: EnteredRow) -> None:
        self._requests[new.row] = self._entered[new.row] = new
        if not self._sleeps:
            self._know(new)
        elif self._looks_ahead():  # its forced tokens are draft tokens, without a drafter
            self.idle_until = 0

    def _know(self, new: EnteredRow) -> None:
        self.controller.enter(new.row)
        self._known[new.row] = len(new.tokens)
        wanted = getattr(new.params, "max_draft_tokens", None)
        self._wanted[new.row] = self.controller.max_drafts if wanted is None else wanted

    def leave(self, row: int) -> None:
        if self._entered.pop(row, None) is None:
            self.drafter.leave(row)
        self._scopes.pop(row, None)
        del self._requests[row]
        if not self._requests:
            self._looked = 0.0

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """It acts around the step, which verifies draft tokens either way."""
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if NAME in plan.extras:  # a row without a scope shares nothing
            self._scopes |= msgspec.msgpack.decode(plan.extras[NAME], type=dict[int, bytes])
        if self._entered and not self._sleeps:
            self._enter_drafter()
        if skipped := plan.step - self._step - 1 if self._sleeps else 0:
            self.controller.skip(len(self._requests), skipped)
            self._looked = 0.0
        self._step = plan.step
        if not self._drafted:
            self._verified = {}
        elif batch is not None:
            draws = Counter(batch.drawing)
            self._verified = {
                row: (place, draws[index] - 1) for index, row, place in batch.first_draws()
            }
        else:
            self._verified = dict(filter(None, map(self._drafts_of, plan.work)))
        if self.drafter.records and self.drafter.reads:
            drafts = self._drafted or any(item.drafts for item in plan.work)
            self._batch = batch
            self._computed = ComputedTokens.before(plan, batch, self.rows) if drafts else None

    def _enter_drafter(self) -> None:
        for row, new in self._entered.items():
            is_faulty = row in self.rows.faults  # a token may be none of the vocabulary
            tokens = [0] * len(new.tokens) if is_faulty else new.tokens
            self.drafter.enter(row, tokens, self._scopes.get(row, new.id.encode()))
        self._entered.clear()

    def _drafts_of(self, item: WorkItem) -> tuple[int, tuple[int, int]] | None:
        """As `_verified`, before the rows have advanced; None: the row has no draft tokens, or draws none."""
        rows, row = self.rows, item.row
        drafts, length = rows.num_drafts.item(row), rows.length.item(row)
        if not (item.samples and drafts):
            return None
        end = min(rows.num_computed_tokens.item(row) + item.num_tokens, length)
        return row, (length - drafts, end - length + drafts)

    def after(self, plan: StepPlan) -> None:
        if self.drafter.observes and not self._sleeps:
            reads = self.drafter.records and self.drafter.reads
            self.drafter.observe(plan, self._computed_tokens(plan) if reads else None)
        computed_of, length_of = self.rows.num_computed_tokens.item, self.rows.length.item
        drew = [
            item.row
            for item in plan.work
            if item.samples and computed_of(item.row) == length_of(item.row) - 1
        ]
        num_tokens = sum(item.num_tokens - item.drafts for item in plan.work)
        self._decodes = num_tokens == len(drew) == len(plan.work)
        report = self._verify_counts()
        if not self.waits:
            report.num_drafts = self._propose(drew, report)
        self.reports.append((drew, report))

    def _computed_tokens(self, plan: StepPlan) -> ComputedTokens | None:
        if self._model is None:
            return None
        batch = self._batch
        states = self._model.fast_states if batch is None else batch.hidden_states
        computed = self._computed or ComputedTokens.without_drafts(plan, self.rows)
        return computed.finish(self.rows, states)

    def _verify_counts(self) -> DraftReport:
        """What this step verified."""
        rows, report = self.rows, DraftReport({}, [])
        for row, (before, drafts) in self._verified.items():
            if drafts:
                accepted = rows.length.item(row) - before - 1
                report.verified.append((drafts, accepted))
                if self.names_requests:
                    report.ids.append(rows.ids[row] or "")
                self.controller.learn(row, drafts, accepted)
        return report

    def _propose(self, drew: list[int], report: DraftReport) -> dict[int, int]:
        """Give draft tokens to these rows. Returns how many each has, where the gate does not know that it has none."""
        sleeps = self.controller.sleeps(len(drew)) and not (self._drafted or self._looks_ahead())
        if self._sleeps != sleeps:
            self._sleeps = sleeps
            (self._sleep if sleeps else self._wake)()
        proposals: dict[int, list[int]] = {} if sleeps else self._proposals_of(drew)
        if drew:
            proposals = self._record(drew, proposals, report)
        counts = {row: len(drafts) for row, drafts in proposals.items() if drafts}
        for row in counts:
            self.rows.put_drafts(row, proposals[row])
        if sleeps:
            self.idle_until = self._step + IDLE_STEPS
        if not (counts or self._drafted):
            return counts
        num_drafts = dict.fromkeys(self._drafted.intersection(drew), 0) | counts
        self._drafted = self._drafted.difference(drew) | counts.keys()
        return num_drafts

    def _looks_ahead(self) -> bool:
        return any(processor.looks_ahead for processor in self.processors)

    def _proposals_of(self, drew: list[int]) -> dict[int, list[int]]:
        rows, drafter, limit = self.rows, self.drafter, self.max_drafts_at(len(drew))
        lengths = dict(zip(drew, map(rows.length.item, drew), strict=True))
        if drafter.extends:
            for row, length in lengths.items():
                drafter.extend(row, rows.tokens_of(row, self._known[row], length))
                self._known[row] = length
        accepts, end, wanted = rows.accepts_drafts.item, rows.max_model_len, self._wanted
        room = {
            row: min(limit, wanted[row], end - length) if accepts(row) else 0
            for row, length in lengths.items()
        }
        limits = self.controller.limits(room)
        if drafter.records:  # it has no hidden states of added tokens
            computed_of = rows.num_computed_tokens.item
            limits = {r: n for r, n in limits.items() if computed_of(r) == lengths[r] - 1}
        proposals = drafter.propose_all(limits)
        for processor in self.processors:
            processor.look_ahead(proposals, room)
        return proposals

    def _sleep(self) -> None:
        """Draft tokens make the engine slower: until they are tried again, the drafter does not follow the requests."""
        for row in self._requests.keys() - self._entered:
            self.drafter.leave(row)
        self.drafter.sleep()
        self._entered = dict(self._requests)

    def _wake(self) -> None:
        """The requests that have rows enter again, with all their tokens."""
        rows, running = self.rows, list(self._entered.values())
        for number, new in enumerate(running):
            tokens = rows.tokens_of(new.row, 0, rows.length.item(new.row))
            running[number] = msgspec.structs.replace(new, tokens=tokens, num_computed_tokens=0)
            self._know(running[number])
        if not self.drafter.takes_running:
            self._entered.clear()
            return
        self._entered = {new.row: new for new in running}
        self._enter_drafter()
        if self.drafter.observes:
            self.drafter.observe(StepPlan(0, running, [], []), None)

    def _record(
        self, drew: list[int], proposals: dict[int, list[int]], report: DraftReport
    ) -> dict[int, list[int]]:
        """The draft tokens that all ranks have. Ranks record the same seconds, so all speculate in the same steps."""
        before, self._looked = self._looked, time.perf_counter()
        seconds = self._looked - before if before else 0.0
        if self.agree is not None:
            (seconds,), proposals = self.agree([seconds], drew, proposals)
        verified = sum(drafts for drafts, _ in report.verified)
        num_tokens = len(drew) + sum(accepted for _, accepted in report.verified)
        self.controller.record(len(drew), num_tokens, verified, seconds, self._decodes)
        return proposals

    def report(self) -> bytes | None:
        if not self.reports:
            return None
        drew, report = self.reports.popleft()
        if self.waits:
            report.num_drafts = self._propose(drew, report)
        is_empty = not (report.num_drafts or report.verified)
        return None if is_empty else msgspec.msgpack.encode(report)
