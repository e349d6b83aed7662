"""Drafter: proposes the tokens that may follow a row's tokens. A wrong proposal costs time, and never changes a token.

Knows rows and tokens. Does not know how proposals are verified, or how many pay off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan
    from quire.worker.request_rows import RequestRows

NEVER = 1 << 30
"""`Drafter.lacking` of a row that a drafter cannot propose for."""


@dataclass(slots=True)
class ComputedTokens:
    """What the target computed in a step, and what it recorded of that (`Drafter.records`).

    Attributes:
        rows: of each work item.
        starts, ends: its first position, and the one behind its last that is right: draft tokens that were not are left out.
        places: where it starts among the step's tokens.
        states: by number of layers: at least [T, D].
    """

    rows: list[int]
    starts: list[int]
    places: list[int]
    ends: list[int] = field(default_factory=list)
    states: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def before(
        cls, plan: StepPlan, batch: ForwardBatch | None, rows: RequestRows
    ) -> ComputedTokens:
        """Of a step that has not run. The batch has advanced the rows."""
        numbers = [item.row for item in plan.work]
        if batch is not None:
            counts = batch.query_lens
            starts = [end - count for end, count in zip(batch.lengths, counts, strict=True)]
        else:
            starts = list(map(rows.num_computed_tokens.item, numbers))
            known = zip(plan.work, starts, map(rows.length.item, numbers), strict=True)
            counts = [min(item.num_tokens, length - start) for item, start, length in known]
        return cls(numbers, starts, list(itertools.accumulate(counts, initial=0))[:-1])

    @classmethod
    def without_drafts(cls, plan: StepPlan, rows: RequestRows) -> ComputedTokens:
        """Of a step that has run, and had no draft tokens: all that it computed is right."""
        numbers = [item.row for item in plan.work]
        counts = [item.num_tokens for item in plan.work]
        starts = [rows.num_computed_tokens.item(item.row) - item.num_tokens for item in plan.work]
        return cls(numbers, starts, list(itertools.accumulate(counts, initial=0))[:-1])

    def finish(self, rows: RequestRows, states: Mapping[int, Tensor]) -> ComputedTokens:
        """The step has run."""
        self.ends, self.states = list(map(rows.num_computed_tokens.item, self.rows)), states
        return self


class Drafter:
    """Keeps what it needs of each row's tokens. The base class proposes nothing.

    A class of the user's own (`custom_class`) has these methods too; it is made with the `SpeculativeOptions`.
    `records`: numbers of the target's layers whose output it reads (`LanguageModel.record_hidden_states`).
    """

    records: Sequence[int] = ()
    reads = True  # whether it reads what the next step records
    observes = True  # False: `observe` does nothing
    extends = True  # False: `extend` does nothing
    is_checked = False  # True: it proposes tokens of the vocabulary, and no more than the limit
    pays = True  # False: of late no draft tokens paid, but for some that show whether they would
    takes_running = True  # False: it must have seen all steps of a request
    has_model = False  # True: it proposes by passes of a model
    computed = (0, 0, 0)
    """Of the last proposals: rows of which a model ran, its passes, and the tokens of the first one; many: it caught up with a
    prompt."""
    unsure: Set[int] = frozenset()
    """Rows of the last proposals whose draft tokens are less likely to be right than others of the row."""

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        """As `Hook.use_models`."""

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        """A request takes a row (again, after a preemption), with these tokens.

        What a drafter learns of the texts of a row may reach only rows of an equal `scope`: the same tenant, salt and
        adapter.
        """

    def leave(self, row: int) -> None:
        """The row is freed."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more tokens, which are certain."""

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        """A step has run; called before `propose_all`. None: the drafter records nothing."""

    def sleep(self) -> None:
        """All rows left. It sees none of the next steps; then the requests enter that have rows."""

    def lacking(self, row: int) -> int:
        """How many of the row's tokens a model must compute before it can propose; with a model that runs only then."""
        return 0

    def propose(self, row: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the row's tokens."""
        return []

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        """As `propose`, for several rows with a limit each. A row may be missing: it has no proposal.

        It is called after every step, maybe with no rows.
        """
        self.unsure = frozenset()
        return {row: self.propose(row, limit) for row, limit in limits.items()}

    def propose_within(
        self, limits: dict[int, int], of_model: dict[int, int]
    ) -> dict[int, list[int]]:
        """As `propose_all`. A model proposes for the rows of `of_model` alone, and so many: its passes take time."""
        if self.has_model:
            limits = {row: min(n, of_model[row]) for row, n in limits.items() if row in of_model}
        return self.propose_all(limits)
