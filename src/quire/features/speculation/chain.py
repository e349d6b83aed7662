"""Chain: several drafters; each is asked for the rows that the drafters before it have no proposal for.

Knows drafters. Does not know how they guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.features.speculation.drafter import ComputedTokens, Drafter

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan


class Chain(Drafter):
    """The cheapest drafters first: one with a model computes only for rows that have no proposal yet."""

    def __init__(self, drafters: Sequence[Drafter]):
        self.drafters = list(drafters)
        self.observes = any(drafter.observes for drafter in self.drafters)
        self.extends = any(drafter.extends for drafter in self.drafters)
        self.takes_running = all(drafter.takes_running for drafter in self.drafters)
        self.is_checked = all(drafter.is_checked for drafter in self.drafters)
        self.records = sorted({number for drafter in drafters for number in drafter.records})

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return any(drafter.reads for drafter in self.drafters if drafter.records)

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        for drafter in self.drafters:
            drafter.use_models(models)

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        for drafter in self.drafters:
            drafter.enter(row, tokens, scope)

    def leave(self, row: int) -> None:
        for drafter in self.drafters:
            drafter.leave(row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.extend(row, tokens)

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        for drafter in self.drafters:
            drafter.observe(plan, step)

    def sleep(self) -> None:
        for drafter in self.drafters:
            drafter.sleep()

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        proposals: dict[int, list[int]] = {}
        for drafter in self.drafters:
            left = {row: limit for row, limit in limits.items() if not proposals.get(row)}
            proposals |= drafter.propose_all(left)
        return proposals
