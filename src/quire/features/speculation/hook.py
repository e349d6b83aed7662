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

from quire.features.speculation.draft_length import DraftLength
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.features.speculation.gate import NAME, DraftReport
from quire.features.speculation.rank_agreement import RankAgreement
from quire.protocol.plan import StepPlan
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.parallel.ranks import TensorRanks
    from quire.protocol.plan import EnteredRow, WorkItem
    from quire.worker.request_rows import RequestRows
    from quire.worker.sampling.logits_processors import Processor


COLD_STEPS = 48  # the first ones of a process, which take longer: their times say nothing
IDLE_STEPS = 64  # of a drafter that sleeps: then the hook looks again whether it should
TIMED_RESTS = 16  # the last steps of a rest say how long a step takes without draft tokens


class SpeculationHook(Hook):
    """The draft tokens are in the rows before the engine plans the next step of them.

    Args:
        length: how many draft tokens each row gets.
        most_at: the most of a row, where so many rows draw.
        names_requests: report the ids of requests, beside the counts of their draft tokens.
        processors: logits processors that may cut or replace draft tokens (`Processor.look_ahead`).
        ranks: those that split the model; they take the same draft tokens.
        models: the places of the drafter's models among those of the worker.
        waits: the result of a step is read before the next one runs. Draft tokens are proposed then, so that they follow the
            forced tokens of the step. Else they are proposed when the step is queued.
    """

    name = NAME
    order = 70

    def __init__(
        self,
        rows: RequestRows,
        drafter: Drafter,
        length: DraftLength,
        most_at: Callable[[int], int],
        names_requests: bool = False,
        processors: Sequence[Processor] = (),
        ranks: TensorRanks | None = None,
        waits: bool = False,
        models: slice = slice(1, None),
    ):
        self.rows, self.drafter, self.length, self.most_at = rows, drafter, length, most_at
        self.agree = None if ranks is None else RankAgreement(ranks, length.most)
        self.names_requests, self.processors, self.waits = names_requests, processors, waits
        self.models = models
        # Of steps whose results are not read yet: the rows that drew, and the report.
        # None: the step rested.
        self.reports: deque[tuple[list[int], DraftReport] | None] = deque()
        self._requests: dict[int, EnteredRow] = {}  # by row
        self._entered: dict[int, EnteredRow] = {}  # those that the drafter does not know yet
        self._scopes: dict[int, bytes] = {}  # by row, those that came with a plan
        self._sleeps = False  # the drafter knows no request
        self._step = 0  # the number of the last plan
        self._known: dict[int, int] = {}  # by row: tokens that the drafter knows
        self._most: dict[int, int] = {}  # by row: the most draft tokens that its request wants
        self._drafted: set[int] = set()  # rows that may have draft tokens, as the gate knows
        self._verified: dict[int, tuple[int, int]] = {}  # by row: length before, draft tokens
        # When the look before the step ended, from where a step's time counts: the engine's own part is in it. 0: not known.
        # Where that part takes longer than the step before, no request ran.
        self._began = self._looked = self._start = self._took = 0.0
        self._rests = False
        # Since the last look: when it ended, without the time in which no request ran; steps, and their tokens.
        self._since, self._steps, self._tokens = 0.0, 0, 0.0
        self._cold = COLD_STEPS
        self._accepted: dict[int, int] = {}  # by row: draft tokens of the last step
        # Of the last step, if its time says something, or of those that rested before it: rows, tokens and seconds (0: up to the
        # look). Of the last drafts: rows, passes, and the tokens that the model lacked, if there were many.
        self._timed, self._passes = (0, 0, 0.0), (0, 0, 0)
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
        self.length.enter(new.row)
        self._known[new.row] = len(new.tokens)
        most = getattr(new.params, "max_draft_tokens", None)
        self._most[new.row] = self.length.most if most is None else most

    def leave(self, row: int) -> None:
        if self._entered.pop(row, None) is None:
            self.drafter.leave(row)
        self._scopes.pop(row, None)
        del self._requests[row]
        # Those of its last step may be behind the end of its answer: half of them, on average.
        self._tokens -= self._accepted.pop(row, 0) / 2

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """It acts around the step, which verifies draft tokens either way."""
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if NAME in plan.extras:  # a row without a scope shares nothing
            self._scopes |= msgspec.msgpack.decode(plan.extras[NAME], type=dict[int, bytes])
        if self._entered and not self._sleeps:
            self._enter_drafter()
        self._began, self._looked = self._looked, 0.0
        self._start = time.perf_counter()
        if skipped := plan.step - self._step - 1 if self._sleeps else 0:
            self._steps, self._began, self._since = self._steps + skipped, 0.0, 0.0
        self._step = plan.step
        if self._began and (pause := self._start - self._began - self._took) > 0:
            self._began += pause
            self._since += pause
        self._rests = not (self._drafted or self._sleeps) and self.length.rests()
        reads = self.drafter.records and self.drafter.reads
        if self._rests and not reads:
            return
        if not self._drafted:
            self._verified = {}
        elif batch is not None:
            draws = Counter(batch.drawing)
            self._verified = {row: (place, draws[at] - 1) for at, row, place in batch.first_draws()}
        else:
            self._verified = dict(filter(None, map(self._drafts_of, plan.work)))
        if reads:
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
        self._steps += 1
        self._tokens += len(plan.work)
        self._accepted.clear()
        if self._rests:
            self.reports.append(None)
            self._rested(plan)
            return
        rows, work = self.rows, plan.work
        computed_of, length_of = rows.num_computed_tokens.item, rows.length.item
        drew = [
            item.row
            for item in work
            if item.samples and computed_of(item.row) == length_of(item.row) - 1
        ]
        report = self._verify_counts()
        self._tokens += sum(self._accepted.values())
        if self._began and drew and len(drew) == len(work) and not self._timed[0]:
            # Tokens of prompts take no longer than draft tokens do.
            self._timed = len(drew), sum(item.num_tokens for item in work), 0.0
        if not self.waits:
            report.num_drafts = self._propose(drew)
        self.reports.append((drew, report))

    def _rested(self, plan: StepPlan) -> None:
        self._looked = time.perf_counter()
        self._took = self._looked - self._start
        if self.length.rest >= TIMED_RESTS or not self._began or plan.entered:
            return
        rows, seconds = len(plan.work), self._looked - self._began
        if sum(item.num_tokens for item in plan.work) == rows:  # it computed no prompts
            if self._timed[:2] == (rows, rows):
                seconds = min(seconds, self._timed[2])
            self._timed = rows, rows, seconds

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
                self.length.learn(row, drafts, accepted)
                self._accepted[row] = accepted
        return report

    def _propose(self, drew: list[int]) -> dict[int, int]:
        """Give draft tokens to these rows. Returns how many each has, where the gate does not know that it has none."""
        began, rows = time.perf_counter(), self.rows
        sleeps = self.length.sleeps and not (self._drafted or self._looks_ahead())
        if self._sleeps != sleeps:
            self._sleeps = sleeps
            (self._sleep if sleeps else self._wake)()
        proposals: dict[int, list[int]] = {} if sleeps else self._proposals_of(drew)
        if drew:
            proposals = self._agreed(drew, proposals, began, time.perf_counter())
        counts = {row: len(drafts) for row, drafts in proposals.items() if drafts}
        for row in counts:
            rows.put_drafts(row, proposals[row])
        self._looked = time.perf_counter()
        self._took = self._looked - self._start
        if sleeps:
            self.idle_until = self._step + IDLE_STEPS
        if not (counts or self._drafted):
            return counts
        report = dict.fromkeys(self._drafted.intersection(drew), 0) | counts
        self._drafted = self._drafted.difference(drew) | counts.keys()
        return report

    def _looks_ahead(self) -> bool:
        return any(each.looks_ahead for each in self.processors)

    def _proposals_of(self, drew: list[int]) -> dict[int, list[int]]:
        rows, most = self.rows, self.most_at(len(drew))
        lengths = dict(zip(drew, map(rows.length.item, drew), strict=True))
        if self.drafter.extends:
            for row, length in lengths.items():
                self.drafter.extend(row, rows.tokens_of(row, self._known[row], length))
                self._known[row] = length
        accepts, end, wanted = rows.accepts_drafts.item, rows.max_model_len, self._most
        room = {
            row: min(most, wanted[row], end - length) if accepts(row) else 0
            for row, length in lengths.items()
        }
        proposals = self._proposals(room)
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

    def _agreed(
        self, drew: list[int], proposals: dict[int, list[int]], began: float, now: float
    ) -> dict[int, list[int]]:
        """The draft tokens that all ranks have. What they learn from is the same too, so all rest in the same steps."""
        rows, tokens, step_s = self._timed
        step_s, look_s = step_s or began - self._began, now - began
        period_s, self._since = now - self._since if self._since else 0.0, now
        drafted, passes, lacked = self._passes
        self._timed, self._passes = (0, 0, 0.0), (0, 0, 0)
        if self.agree is not None:
            own = step_s, look_s, period_s, drafted, passes, lacked
            least, proposals = self.agree(own, drew, proposals)
            step_s, look_s, period_s = least[:3]
            drafted, passes, lacked = map(round, least[3:])
        if self._cold > 0:
            self._cold -= self._steps
        else:
            if tokens:
                self.length.timed(rows, tokens, step_s)
            if drafted:
                self.length.drafted(look_s, drafted, passes, lacked)
            self.length.spent(len(drew), self._steps, self._tokens, period_s)
        self._steps, self._tokens = 0, 0.0
        found = any(proposals.values()) or self._looks_ahead()
        self.length.looked(found, len(drew), look_s)
        return proposals

    def _proposals(self, room: dict[int, int]) -> dict[int, list[int]]:
        """The drafter's proposals that pay off."""
        limits = self.length.limits(room, self.drafter.lacking)
        if self.drafter.records and limits:  # it has no hidden states of forced tokens
            computed_of, length_of = self.rows.num_computed_tokens.item, self.rows.length.item
            forced = [row for row in limits if computed_of(row) < length_of(row) - 1]
            for row in forced:
                del limits[row]
        self.drafter.pays = self.length.pays or self.length.checks
        found = self.drafter.propose_within(limits, self.length.of_model)
        drafted, passes, tokens = self.drafter.computed
        if drafted:
            usual = (2 * self.length.most + 1) * drafted
            self._passes = drafted, passes, tokens if tokens > usual or not passes else 0
        self.length.cut(found, len(room), self.drafter.unsure)
        return found

    def report(self) -> bytes | None:
        if not self.reports or (last := self.reports.popleft()) is None:
            return None
        drew, report = last
        if self.waits:
            report.num_drafts = self._propose(drew)
        is_empty = not (report.num_drafts or report.verified)
        return None if is_empty else msgspec.msgpack.encode(report)
