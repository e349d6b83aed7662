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
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.parallel.ranks import TensorRanks
    from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
    from quire.worker.request_rows import RequestRows
    from quire.worker.sampling.logits_processors import Processor


class SpeculationHook(Hook):
    """The draft tokens are in the rows before the engine plans the next step of them.

    Args:
        length: how many draft tokens each row gets.
        most_at: the most of a row, where so many rows draw.
        names_requests: report the ids of requests, beside the counts of their draft tokens.
        processors: logits processors that may cut or replace draft tokens (`Processor.look_ahead`).
        ranks: those that split the model; they take the same draft tokens.
        waits: the result of a step is read before the next one runs. Draft tokens are proposed then, so that they follow the
            forced tokens of the step. Else they are proposed when the step is queued.
    """

    name = NAME

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
    ):
        self.rows, self.drafter, self.length, self.most_at = rows, drafter, length, most_at
        self.agree = None if ranks is None else RankAgreement(ranks, length.most)
        self.names_requests, self.processors, self.waits = names_requests, processors, waits
        # Of steps whose results are not read yet: the rows that drew, and the report.
        # None: the step rested.
        self.reports: deque[tuple[list[int], DraftReport] | None] = deque()
        self._undrawn: set[int] = set()  # rows that have not drawn since their request entered
        # by row: requests that the drafter does not know yet
        self._entered: dict[int, EnteredRow] = {}
        self._known: dict[int, int] = {}  # by row: tokens that the drafter knows
        self._most: dict[int, int] = {}  # by row: the most draft tokens that its request wants
        self._drafted: set[int] = set()  # rows that may have draft tokens, as the gate knows
        self._verified: dict[int, tuple[int, int]] = {}  # by row: length before, draft tokens
        # When the look before the step ended, from where a step's time counts: the engine's own part is in it. 0: not known.
        self._began = self._looked = 0.0
        self._rests = False
        # Of the last step, if its time says something: rows, tokens and seconds. Of its drafts: rows, passes, and the tokens
        # that the model lacked, if there were many.
        self._step_time, self._passes = (0, 0, 0.0), (0, 0, 0)
        self._model: LanguageModel | None = None
        self._batch: ForwardBatch | None = None
        self._computed: ComputedTokens | None = None

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self._model = models[0]
        self.drafter.use_models(models)

    def enter(self, new: EnteredRow) -> None:
        self._entered[new.row] = new
        self._undrawn.add(new.row)
        self.length.enter(new.row)
        self._known[new.row] = len(new.tokens)
        most = getattr(new.params, "max_draft_tokens", None)
        self._most[new.row] = self.length.most if most is None else most

    def leave(self, row: int) -> None:
        if self._entered.pop(row, None) is None:
            self.drafter.leave(row)
        self._undrawn.discard(row)
        del self._known[row]

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """It acts around the step, which verifies draft tokens either way."""
        return True

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if self._entered:
            self._enter_drafter(plan)
        self._began, self._looked = self._looked, 0.0
        self._rests = not self._drafted and self.length.rests()
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

    def _enter_drafter(self, plan: StepPlan) -> None:
        """The scopes of the rows come with their plan; a row without one shares nothing."""
        extra = plan.extras.get(NAME)
        scopes = msgspec.msgpack.decode(extra, type=dict[int, bytes]) if extra else {}
        for row, new in self._entered.items():
            is_faulty = (
                row in self.rows.faults
            )  # a token of its prompt may be none of the vocabulary
            tokens = [0] * len(new.tokens) if is_faulty else new.tokens
            self.drafter.enter(row, tokens, scopes.get(row, new.id.encode()))
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
        now = time.perf_counter()
        if self.drafter.observes:
            reads = self.drafter.records and self.drafter.reads
            self.drafter.observe(plan, self._computed_tokens(plan) if reads else None)
        if self._rests:
            self.reports.append(None)
            self._looked = now
            return
        rows, work = self.rows, plan.work
        computed_of, length_of = rows.num_computed_tokens.item, rows.length.item
        drew = [
            item.row
            for item in work
            if item.samples and computed_of(item.row) == length_of(item.row) - 1
        ]
        report = self._verify_counts()
        is_timed = self._began and drew and len(drew) == len(work)
        if is_timed and self._undrawn.isdisjoint(drew):  # it computed no prompts
            tokens = len(drew) + sum(n for _, n in self._verified.values() if n > 0)
            self._step_time = len(drew), tokens, now - self._began
        self._undrawn.difference_update(drew)
        if not self.waits:
            report.num_drafts = self._propose(drew)
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
                self.length.learn(row, drafts, accepted)
        return report

    def _propose(self, drew: list[int]) -> dict[int, int]:
        """Give draft tokens to these rows. Returns how many each has, where the gate does not know that it has none."""
        began, rows, most = time.perf_counter(), self.rows, self.most_at(len(drew))
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
        if drew:
            proposals = self._agreed(drew, proposals, time.perf_counter() - began)
        counts = {row: len(drafts) for row, drafts in proposals.items() if drafts}
        for row in counts:
            rows.put_drafts(row, proposals[row])
        self._looked = time.perf_counter()
        if not (counts or self._drafted):
            return counts
        report = dict.fromkeys(self._drafted.intersection(drew), 0) | counts
        self._drafted = self._drafted.difference(drew) | counts.keys()
        return report

    def _agreed(
        self, drew: list[int], proposals: dict[int, list[int]], look_s: float
    ) -> dict[int, list[int]]:
        """The draft tokens that all ranks have. What they learn from is the same too, so all rest in the same steps."""
        rows, tokens, step_s = self._step_time
        drafted, passes, lacked = self._passes
        self._step_time, self._passes = (0, 0, 0.0), (0, 0, 0)
        if self.agree is not None:
            own = step_s, look_s, drafted, passes, lacked
            least, proposals = self.agree(own, drew, proposals)
            step_s, look_s = least[:2]
            drafted, passes, lacked = map(round, least[2:])
        if tokens:
            self.length.timed(rows, tokens, step_s)
        if drafted:
            self.length.drafted(look_s, drafted, passes, lacked)
        found = any(proposals.values()) or any(each.looks_ahead for each in self.processors)
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
        self.drafter.pays = self.length.pays
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
