"""StateRollback: takes recurrent states back behind draft tokens that were wrong.

Knows rows and the places of kept states. Does not know how a layer keeps them (`ops/recurrent.py`), or how draft tokens are
verified. The pass keeps the state of a row behind its known tokens and behind each of its draft tokens but the last, whose
state is the row's own (docs/design/recurrent-state.md).
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

    def __init__(self, states: RowStates, rows: RequestRows):
        self.states, self.rows = states, rows
        self.verified: list[tuple[int, int, int]] = []  # row, known tokens, draft tokens

    def accepts_fast_step(self, plan: StepPlan) -> bool:
        """The fast path keeps no states."""
        return not self.rows.num_drafts.any()

    def before(self, plan: StepPlan, batch: ForwardBatch | None) -> None:
        self.verified = []
        if batch is None or len(batch.drawing) == len(set(batch.drawing)):
            return
        kept_T, ends = np.zeros(batch.num_tokens, np.int64), list(accumulate(batch.query_lens))
        draws = Counter(batch.drawing)
        for index, row, known in batch.first_draws():
            if drafts := draws[index] - 1:
                first, last = self.states.kept_entry(row, 0), ends[index] - 1
                kept_T[last - drafts : last] = range(first, first + drafts)
                self.verified.append((row, known, drafts))
        batch.extras[KEPT_STATES] = self.rows.tensor(kept_T)

    def after(self, plan: StepPlan) -> None:
        for row, known, drafts in self.verified:
            accepted = int(self.rows.length[row]) - known - 1
            if accepted < drafts:
                self.states.take_back(row, accepted)
