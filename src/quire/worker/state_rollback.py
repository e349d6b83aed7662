"""StateRollback: returns a row to the recurrent state before its rejected draft tokens.

Knows rows and the places of kept states. Does not know how a layer keeps them (`ops/recurrent.py`), or how draft tokens are
verified. While it verifies, the pass saves the recurrent state after a row's last known token and after each draft token but
the last, whose state is the live one (docs/design/recurrent-state.md).
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from quire.forward_context import KEPT_STATES
from quire.worker.hooks import Hook

if TYPE_CHECKING:
    from quire.forward_context import ForwardBatch
    from quire.protocol.plan import StepPlan
    from quire.worker.request_rows import RequestRows
    from quire.worker.row_states import RowStates


class StateRollback(Hook):
    """Runs before all hooks that add draft tokens."""

    name = "state_rollback"
    order = 20

    def __init__(self, states: RowStates, rows: RequestRows):
        self.states, self.rows = states, rows
        self.verified: dict[int, tuple[int, int]] = {}  # by row: known tokens, draft tokens

    def leave(self, row: int) -> None:
        self.verified.pop(row, None)

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """The fast path keeps no states."""
        return not self.rows.num_drafts.any()

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        if self.verified:
            self._take_back(plan, batch)
        if batch is None or len(batch.drawing) == len(set(batch.drawing)):
            return
        kept_T, ends = np.zeros(batch.num_tokens, np.int64), list(accumulate(batch.query_lens))
        draws = Counter(batch.drawing)
        for index, row, known in batch.first_draws():
            if drafts := draws[index] - 1:
                first, last = self.states.kept_entry(row, 0), ends[index] - 1
                kept_T[last - drafts : last] = range(first, first + drafts)
                self.verified[row] = known, drafts
        batch.extras[KEPT_STATES] = self.rows.tensor(kept_T)

    def _take_back(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        """Let each row continue after the draft tokens that the previous step accepted. Only now does every stage know them."""
        for index, item in enumerate(plan.work):
            known, drafts = self.verified.pop(item.row, (0, 0))
            start = int(self.rows.num_computed_tokens[item.row])
            if batch is not None:  # it has advanced the rows
                start = batch.lengths[index] - batch.query_lens[index]
            accepted = start - known
            if accepted < drafts:
                self.states.take_back(item.row, accepted)
