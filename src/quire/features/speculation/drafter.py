"""Drafter: proposes the tokens that may follow a row's tokens. A wrong proposal costs time, and never changes a token.

Knows rows and tokens. Does not know how proposals are verified, or how many pay off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.forward_context import ForwardBatch
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan
    from quire.worker.request_rows import RequestRows


@dataclass(slots=True)
class ComputedTokens:
    """What the target computed in a step, and what it recorded of that (`Drafter.records`).

    Attributes:
        rows: of each work item.
        starts, ends: its first position, and the position after its last accepted token; rejected draft tokens are left out.
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
    takes_running = True  # False: it must have seen all steps of a request

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

    def propose(self, row: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the row's tokens."""
        return []

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        """As `propose`, for several rows with a limit each. A row may be missing: it has no proposal.

        It is called after every step, maybe with no rows.
        """
        return {row: self.propose(row, limit) for row, limit in limits.items()}
