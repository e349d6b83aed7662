"""EagleDrafter: a speculator draws the next tokens of rows from the target's hidden states: EAGLE, MTP, Medusa, MLP speculators.

Knows which positions the target computed, and the passes of a speculator. A speculator with keys and values computes all of
them, in the same blocks, but not in each step (`pending_hidden_states.py`). Does not know any speculator (`models/speculators`).

    positions   |-- before --|-- waiting ------|          the speculator reads the token after each
    pass 0                    states of the target -> d1
    pass 1                                          state of pass 0 -> d2

A speculator with masks reads them after the newest token in pass 0, and draws at all of them (P-EAGLE).

Shape suffixes: T tokens of a pass, E features of the target's states, D features of the speculator's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.features.speculation.draft_model_runner import DraftModelRunner
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.features.speculation.pending_hidden_states import (
    CHECKED_POSITIONS,
    PendingHiddenStates,
    States,
    as_tensor,
    concatenated,
    too_many,
)
from quire.models.base import LanguageModel
from quire.protocol.plan import WorkItem

if TYPE_CHECKING:
    from quire.protocol.plan import StepPlan


class EagleDrafter(Drafter):
    """Drafts for rows of less than `max_model_len` tokens. The last of the worker's models is the speculator.

    Args:
        records: numbers of the target's layers whose states the speculator takes, one beside the other.
        has_layers: the speculator has keys and values, so it computes every token; False: only tokens of rows that draw.
        most: how many tokens the speculator can guess; None: any number.
    """

    extends, is_checked, takes_running = False, True, False

    def __init__(
        self,
        passes: DraftModelRunner,
        records: Sequence[int],
        max_model_len: int,
        *,
        has_layers: bool,
        most: int | None = None,
        mask: tuple[int, Tensor] | None = None,
    ):
        self.passes, self.rows, self.records = passes, passes.rows, tuple(records)
        self.max_model_len = max_model_len
        self.has_layers, self.most, self.mask = has_layers, most, mask
        self._waiting: dict[int, PendingHiddenStates] = {}  # by row
        self._unchecked = 0  # positions that were kept since `too_many` looked
        self._step: ComputedTokens | None = None  # the last one
        self._memory: dict[int, Tensor] = {}  # by record: where the last step left it
        self._words: dict[int, np.ndarray] = {}  # the same

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self.passes.use_model(models[-1])
        if isinstance(models[-1], LanguageModel):  # not asleep
            models[-1].use_target(models[0])  # type: ignore[operator]

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.reads = True

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        self._step = step
        if plan.freed_rows or plan.entered:
            self._update_rows(plan)
        if self.has_layers and step is not None and step.rows:
            self._keep(step)
            if self._unchecked >= CHECKED_POSITIONS:
                self._unchecked = 0
                if rows := too_many(self._waiting):
                    self._make_room(rows)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in (*plan.freed_rows, *(new.row for new in plan.entered)):
            if self._waiting.pop(row, None) is not None:
                self.passes.leave(row)
        for new in plan.entered:
            self.passes.enter(new)
            self._waiting[new.row] = PendingHiddenStates()

    def sleep(self) -> None:
        for row in self._waiting:
            self.passes.leave(row)
        self._waiting.clear()
        self.reads, self._step = False, None

    def _keep(self, step: ComputedTokens) -> None:
        """Copy the states of a step: the next one overwrites them."""
        kept = []
        for row, start, end, index in zip(
            step.rows, step.starts, step.ends, step.places, strict=True
        ):
            if (one := self._waiting.get(row)) is not None and not one.is_lost:
                kept.append((one, start, index, index + end - start))
        if not kept:
            self.reads = not all(one.is_lost for one in self._waiting.values())
            return
        most = kept[-1][-1]
        self._unchecked += most
        states = [self._states(number, step.states[number])[:most] for number in self.records]
        states_TE = concatenated(states, axis=1)
        for one, start, first, last in kept:
            one.add(start, states_TE[first:last])

    def _states(self, number: int, states: Tensor) -> States:
        """What a layer recorded. The fast path records in the same tensor each time."""
        if self._memory.get(number) is not states:
            self._memory[number], self._words = states, {}
            return states
        if states.dtype != torch.bfloat16 or states.device.type != "cpu":
            return states
        if number not in self._words:
            self._words[number] = states.view(torch.int16).numpy()
        return self._words[number]

    @torch.inference_mode()
    def _take_last(self, rows: Container[int]) -> None:
        """Without keys and values only the state of a row's last position counts, and it is used before the next step."""
        step = self._step or ComputedTokens([], [], [])
        for row, start, end, index in zip(
            step.rows, step.starts, step.ends, step.places, strict=True
        ):
            if row in rows and row in self._waiting:
                last = slice(index + end - start - 1, index + end - start)
                states_1E = torch.cat([step.states[number][last] for number in self.records], -1)
                self._waiting[row] = PendingHiddenStates(end - 1, [states_1E], 1)

    def _make_room(self, rows: Sequence[int]) -> None:
        """The prompt's last position stays pending: the first draft pass starts there."""
        self._compute({row: self._waiting[row].count - 1 for row in rows})

    def _compute(self, counts: dict[int, int]) -> None:
        """Compute keys and values of positions, and draw nothing."""
        work: list[WorkItem] = []
        states_nE: list[States] = []
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
            self.passes.draw(work, [0] * len(work), concatenated(states_nE))

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        most: dict[int, int] = {}  # by row that gets draft tokens: how many
        ends: dict[int, int] = {}  # and after which position
        work: list[WorkItem] = []
        states_nE: list[States] = []
        if not self.has_layers:
            self._take_last(limits)
        for row, wanted in limits.items():
            one = self._waiting.get(row)
            if one is None or not one.count:
                continue
            end = one.start + one.count
            if not (limit := self._limit(row, end, wanted)):
                continue
            most[row], ends[row] = limit, end + 1
            first, masks = one.start, self._put_masks(row, end, limit)
            states_nE.append(one.take_first(one.count))
            if self.mask is not None:
                states_nE.append(self.mask[1].to(as_tensor(states_nE[-1])).expand(masks, -1))
            self.rows.set_counts(row, first, end, masks)
            work.append(WorkItem(row, end - first + masks, drafts=masks))
        if not work:
            return {}
        draws = [1] * len(work) if self.mask is not None else list(most.values())
        self.passes.draw(work, draws, concatenated(states_nE))
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
