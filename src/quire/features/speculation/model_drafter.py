"""ModelDrafter: a small model draws the next tokens of rows, all rows in one batch, one token a row in each pass.

Knows up to which token the draft model has computed each row. It computes rows that get draft tokens, and no others: after
steps without draft tokens it first computes the tokens in between, so that a server under load pays nothing. Its keys and
values are in the row's blocks, like the target's. Does not know how a pass runs (`draft_model_runner.py`).

    tokens    |-- computed --|-- first pass ---------| d1 | d2 | d3 |
                              up to the newest token    a pass of one token draws each of the others

Where the target draws the draft tokens too, their keys and values stay. With `mask_token` the first pass has masks after
the newest token, and draws at all of them (PARD, An et al., arXiv 2504.18583).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.features.speculation.draft_model_runner import DraftModelRunner
from quire.features.speculation.draft_rows import ComputedBlocks
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.protocol.plan import WorkItem

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan


@dataclass(slots=True)
class _DraftedRow:
    computed: int  # number of the row's tokens that the draft model has computed
    length: int = 0  # tokens of the row when it got the draft tokens
    drafts: list[int] = field(default_factory=list)


class ModelDrafter(Drafter):
    """Drafts for rows of less than `max_model_len` tokens. The last of the worker's models is the draft model.

    Args:
        kv_group: of the draft model's layers.
        has_windows: some of its layers have a window. What leaves a window is lost, so it computes every step.
        max_step_tokens: the most tokens of a pass.
        vocab_size: rows with other tokens get no draft tokens, since the draft model has no embeddings of these; None: the
            draft model has all of the target's.
        mask_token: see the module.
    """

    extends, is_checked = False, True

    def __init__(
        self,
        passes: DraftModelRunner,
        kv_group: int,
        max_model_len: int,
        max_step_tokens: int,
        *,
        has_windows: bool = False,
        vocab_size: int | None = None,
        mask_token: int | None = None,
    ):
        self.passes, self.rows = passes, passes.rows
        self.max_model_len, self.max_step_tokens = max_model_len, max_step_tokens
        self.has_windows, self.vocab_size, self.mask_token = has_windows, vocab_size, mask_token
        self.blocks, self.takes_running = ComputedBlocks(self.rows, kv_group), not has_windows
        self._rows: dict[int, _DraftedRow] = {}
        self._stepped: list[int] = []  # rows of the last step

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        self.passes.use_model(models[-1])

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        for row in plan.freed_rows:
            self._leave(row)
        for new in plan.entered:
            self._leave(new.row)  # if the step whose plan freed it failed
            self.passes.enter(new)
            self._rows[new.row] = _DraftedRow(self.blocks.enter(new))
        if new_blocks := [item.new_blocks for item in plan.work if item.new_blocks]:
            self.blocks.allocated(new_blocks)
        if self.has_windows:
            self._stepped = [item.row for item in plan.work]

    def sleep(self) -> None:
        for row in list(self._rows):
            self._leave(row)
        self.blocks.clear()

    def _leave(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self.passes.leave(row)

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        also = dict.fromkeys(self._stepped if self.has_windows else (), 0)
        left, planned = self.max_step_tokens, []
        for row, limit in {**also, **limits}.items():
            if (found := self._plan(row, limit, left)) is not None:
                planned.append(found)
                left -= found[0].num_tokens
        if not planned:
            return {}
        work, most = [item for item, _ in planned], [limit for _, limit in planned]
        if self.mask_token is None:
            self.passes.draw(work, most)
        else:
            self.passes.run(work)
        for item, limit in planned:
            self._keep(self._rows[item.row], item, limit)
        return {item.row: self._rows[item.row].drafts for item, limit in planned if limit}

    def _plan(self, row: int, limit: int, left: int) -> tuple[WorkItem, int] | None:
        """A row's part of the first pass, and how many draft tokens it gets. `left`: tokens that the pass has room for."""
        rows, target = self.rows, self.rows.target
        if (one := self._rows.get(row)) is None:
            return None
        length = int(target.length[row] - target.num_drafts[row])
        self._confirm(row, one, length)
        limit = min(limit, min(self.max_model_len, rows.capacity(row)) - length + 1)
        end = length if limit > 0 else min(int(target.num_computed_tokens[row]), self.max_model_len)
        count = min(end - one.computed, left)
        if count < 1 or self._lacks_tokens(row, one.computed, one.computed + count):
            return None
        draws, masks = one.computed + count == length, 0
        if draws and self.mask_token is not None:
            masks = min(limit - 1, left - count)
            rows.write_tokens(row, length, [self.mask_token] * masks)
            limit = masks + 1
        rows.set_counts(row, one.computed, length, masks)
        return WorkItem(row, count + masks, drafts=masks, samples=draws), limit if draws else 0

    def _lacks_tokens(self, row: int, start: int, end: int) -> bool:
        if self.vocab_size is None:
            return False
        return max(self.rows.tokens_of(row, start, end)) >= self.vocab_size

    def _confirm(self, row: int, one: _DraftedRow, length: int) -> None:
        """The row has `length` tokens now. Keys and values of draft tokens stay where these are among its tokens."""
        if one.drafts:
            computed = one.drafts[:-1] if self.mask_token is None else []
            drawn = self.rows.tokens_of(row, one.length, length)
            pairs = list(zip(computed, drawn, strict=False))
            wrong = (number for number, (draft, token) in enumerate(pairs) if draft != token)
            one.computed = one.length + next(wrong, len(pairs))
            self.blocks.computed(row, one.length, one.computed)
            one.drafts = []
        one.computed = min(one.computed, length - 1)

    def _keep(self, one: _DraftedRow, item: WorkItem, limit: int) -> None:
        """The passes have run."""
        start, one.computed = one.computed, one.computed + item.num_tokens - item.drafts
        self.blocks.computed(item.row, start, one.computed)
        one.length = one.computed
        one.drafts = self.rows.tokens_of(item.row, one.length, one.length + limit)
