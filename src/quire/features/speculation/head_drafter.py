"""HeadDrafter: a speculator draws the next tokens of rows from the target's hidden states: EAGLE, MTP, Medusa, MLP speculators.

Knows which positions a step computed, and the passes of a speculator. In each step the speculator computes what the target
computed, so that its keys and values are in the same blocks. Does not know any speculator (`models/speculators`).

    positions   |-- before --|-- of this step --|          the speculator reads the token behind each
    pass 0                    states of the target -> d1
    pass 1                                          state of pass 0 -> d2

A speculator with masks has these behind the newest token in pass 0, and draws at all of them (P-EAGLE).

Shape suffixes: T tokens of a pass, E features of the target's states, D features of the speculator's.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._step: ComputedTokens | None = None
        self._entered: set[int] = set()

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self.passes.use_model(models[-1])
        if isinstance(models[-1], LanguageModel):  # not asleep
            models[-1].use_target(models[0])  # type: ignore[operator]

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        for row in self._entered.intersection(
            (*plan.freed_rows, *(new.row for new in plan.entered))
        ):
            self._entered.discard(row)
            self.passes.leave(row)
        for new in plan.entered:
            self.passes.enter(new)
            self._entered.add(new.row)
        self._step = step

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        step, self._step = self._step, None
        if step is None:
            return {}
        most: dict[
            int, int
        ] = {}  # by row that gets draft tokens: how many, and behind which position
        ends: dict[int, int] = {}
        work: list[WorkItem] = []
        places: list[int] = []  # of the states, among the step's tokens; -1: a mask's
        for row, start, end, at in zip(step.rows, step.starts, step.ends, step.places, strict=True):
            if limit := self._limit(row, end, limits.get(row, 0)):
                most[row], ends[row] = limit, end + 1
            last = min(end, self.max_model_len)
            first = start if self.has_layers else end - 1 if limit else last
            if first < last:
                masks = self._put_masks(row, end, limit)
                self.rows.set_counts(row, first, end, masks)
                work.append(WorkItem(row, last - first + masks, drafts=masks, samples=limit > 0))
                places += [*range(at + first - start, at + last - start), *([-1] * masks)]
        if not work:
            return {}
        self._run(work, most, self._states(step, places))
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
    def _states(self, step: ComputedTokens, places: list[int]) -> Tensor:
        """What pass 0 takes of the target's hidden states."""
        at_T = torch.tensor(places, device=self.rows.device)
        states_TE = torch.cat([step.states[number][at_T] for number in self.records], dim=-1)
        if self.mask is not None:
            states_TE[at_T < 0] = self.mask[1].to(states_TE)
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
