"""HeadDrafter: a speculator draws the next tokens of rows from the target's hidden states: EAGLE, MTP, Medusa, MLP speculators.

Knows which positions the target computed, and the passes of a speculator. A speculator with keys and values computes all of
them, in the same blocks, but not in each step: states of the target wait until the row gets draft tokens, or many wait. So
steps without draft tokens cost little. Does not know any speculator (`models/speculators`).

    positions   |-- before --|-- waiting ------|          the speculator reads the token behind each
    pass 0                    states of the target -> d1
    pass 1                                          state of pass 0 -> d2

A speculator with masks has these behind the newest token in pass 0, and draws at all of them (P-EAGLE).

Shape suffixes: T tokens of a pass, E features of the target's states, D features of the speculator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.features.speculation.draft_passes import DraftPasses
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.forward_context import ForwardBatch
from quire.models.base import LanguageModel
from quire.protocol.plan import WorkItem

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan


class HeadPasses(DraftPasses):
    """Passes of a speculator: each takes states, and leaves those of the rows that drew in `states`."""

    states: Tensor

    def step(self, number: int, work: Sequence[WorkItem], states_TD: Tensor) -> None:
        """Run pass `number`."""
        self.logits.step, self.states = (number,), states_TD
        self.run(work)

    def forward(self, batch: ForwardBatch) -> Tensor:
        speculator, number = self.logits.model, self.logits.step[0]
        embeddings_TD = speculator.embed(batch.token_ids_T, number)
        found_TD: Tensor = speculator(embeddings_TD, batch.positions_T, self.states, number)
        self.states = found_TD[batch.sample_at_S]
        return found_TD


MOST_OF_ROW, MOST_OF_ALL = 64, 1024
"""Positions that wait: of a row without draft tokens, and of all rows together."""


@dataclass(slots=True)
class _WaitingPositions:
    """Of a row, up to the last that the target computed: where they begin, and their states, by step [n, E]."""

    start: int
    states_nE: list[Tensor]
    count: int = 0

    def add(self, states_nE: Tensor) -> None:
        self.states_nE.append(states_nE)
        self.count += len(states_nE)

    def take_first(self, count: int) -> Tensor:
        """The states of the first positions, which then wait no longer."""
        states_NE = torch.cat(self.states_nE)
        self.start, self.count = self.start + count, self.count - count
        self.states_nE = [states_NE[count:]]
        return states_NE[:count]


class HeadDrafter(Drafter):
    """Drafts for rows of less than `max_model_len` tokens. The last of the worker's models is the speculator.

    Args:
        records: numbers of the target's layers whose states the speculator takes, one beside the other.
        has_layers: the speculator has keys and values, so it computes every token; False: those of rows that draw.
        most: how many tokens it can guess; None: any number.
    """

    def __init__(
        self,
        passes: HeadPasses,
        records: Sequence[int],
        max_model_len: int,
        *,
        has_layers: bool,
        most: int | None = None,
        mask: tuple[int, Tensor] | None = None,
    ):
        self.passes, self.rows, self.records = passes, passes.rows, tuple(records)
        self.max_model_len, self.has_layers, self.most, self.mask = (
            max_model_len,
            has_layers,
            most,
            mask,
        )
        self._waiting: dict[int, _WaitingPositions] = {}  # by row
        self._stepped: list[int] = []  # rows of the last step

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self.passes.use_model(models[-1])
        if isinstance(models[-1], LanguageModel):  # not asleep
            models[-1].use_target(models[0])  # type: ignore[operator]

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        for row in (*plan.freed_rows, *(new.row for new in plan.entered)):
            if self._waiting.pop(row, None) is not None:
                self.passes.leave(row)
        for new in plan.entered:
            self.passes.enter(new)
            self._waiting[new.row] = _WaitingPositions(0, [])
        self._stepped = [] if step is None else step.rows
        if step is not None and step.rows:
            self._keep(step)
            self._compute(self._overdue())

    @torch.inference_mode()
    def _keep(self, step: ComputedTokens) -> None:
        """Copy the states of a step: the next one overwrites them."""
        spans = [
            (at, end - start)
            for at, start, end in zip(step.places, step.starts, step.ends, strict=True)
        ]
        most = max(at + count for at, count in spans)
        states_TE = torch.cat([step.states[number][:most] for number in self.records], dim=-1)
        for row, start, (at, count) in zip(step.rows, step.starts, spans, strict=True):
            if (one := self._waiting.get(row)) is None:
                continue
            if not self.has_layers or one.start + one.count != start:
                one.start, one.states_nE, one.count = start, [], 0
            one.add(states_TE[at : at + count])

    def _overdue(self) -> dict[int, int]:
        """By row: how many positions no longer wait for draft tokens. The last one does, since the first pass of a draft draws
        behind it."""
        if not self.has_layers:
            return {}
        waiting = {row: one.count - 1 for row, one in self._waiting.items()}
        if sum(waiting.values()) <= MOST_OF_ALL:
            return {row: count for row, count in waiting.items() if count >= MOST_OF_ROW}
        return {row: count for row, count in waiting.items() if count > 0}

    def _compute(self, counts: dict[int, int]) -> None:
        """Keys and values of positions behind which nothing is drawn."""
        work, states_nE = [], []
        for row, count in counts.items():
            one = self._waiting[row]
            first, last = one.start, min(one.start + count, self.max_model_len)
            own_nE = one.take_first(count)
            if first < last:
                # one token more than are computed: so nothing is drawn
                self.rows.set_counts(row, first, last + 1)
                work.append(WorkItem(row, last - first, samples=False))
                states_nE.append(own_nE[: last - first])
        if work:
            self.passes.step(0, work, self._target_states(torch.cat(states_nE)))

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        most: dict[int, int] = {}  # by row that gets draft tokens: how many
        ends: dict[int, int] = {}  # and behind which position
        work: list[WorkItem] = []
        states_nE: list[Tensor] = []
        for row in self._stepped:
            one = self._waiting.get(row)
            if one is None or not one.count:
                continue
            end = one.start + one.count
            if not (limit := self._limit(row, end, limits.get(row, 0))):
                continue
            most[row], ends[row] = limit, end + 1
            if not self.has_layers:
                one.take_first(one.count - 1)
            first, masks = one.start, self._put_masks(row, end, limit)
            states_nE.append(one.take_first(one.count))
            if self.mask is not None:
                states_nE.append(self.mask[1].to(states_nE[-1]).expand(masks, -1))
            self.rows.set_counts(row, first, end, masks)
            work.append(WorkItem(row, end - first + masks, drafts=masks))
        if not work:
            return {}
        self.num_first = sum(item.num_tokens for item in work)
        self._run(work, most, self._target_states(torch.cat(states_nE)))
        return {row: self.rows.tokens_of(row, ends[row], ends[row] + most[row]) for row in most}

    def _limit(self, row: int, end: int, limit: int) -> int:
        """How many draft tokens a row can get, of which the target has computed `end` positions."""
        room = self.max_model_len
        if self.has_layers:
            room = min(room, self.rows.capacity(row))
        if self.most is not None:
            limit = min(limit, self.most)
        return max(min(limit, room - end + 1), 0)

    def _put_masks(self, row: int, end: int, limit: int) -> int:
        if self.mask is None or limit < 2:
            return 0
        self.rows.write_tokens(row, end + 1, [self.mask[0]] * (limit - 1))
        return limit - 1

    @torch.inference_mode()
    def _target_states(self, states_TE: Tensor) -> Tensor:
        """What pass 0 takes of the target's hidden states."""
        found_TD: Tensor = self.passes.logits.model.target_states(states_TE)
        return found_TD

    def _run(self, work: list[WorkItem], most: dict[int, int], states_TD: Tensor) -> None:
        """All passes. A row takes part until it has its draft tokens."""
        self.passes.step(0, work, states_TD)
        if self.mask is not None:
            return
        drew = [item.row for item in work if item.samples]
        for number in range(1, max(most.values(), default=0)):
            staying = [at for at, row in enumerate(drew) if most[row] > number]
            if len(staying) < len(drew):
                drew = [drew[at] for at in staying]
                self.passes.states = self.passes.states[staying]
            self.passes.step(number, [WorkItem(row, 1) for row in drew], self.passes.states)
