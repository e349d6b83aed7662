"""Drafters: one or several drafters as one. Whatever a drafter does, it costs proposals only.

Knows drafters, limits and the vocabulary. Does not know how a drafter guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quire.errors import RankLost
from quire.features.speculation.drafter import ComputedTokens, Drafter
from quire.logging import get_logger

if TYPE_CHECKING:
    from quire.models.base import LanguageModel
    from quire.protocol.plan import StepPlan
    from quire.worker.request_rows import RequestRows

log = get_logger(__name__)

LOST = (torch.AcceleratorError, RankLost)
"""The device, or another rank that has a part of a drafter's model: the engine cannot go on."""


class Drafters(Drafter):
    """Each drafter is asked for the rows that the ones before it have no proposal for: the cheapest comes first, and one with a
    model computes only for rows that have none yet.

    Logs the first exception of a drafter. Rows whose tokens a drafter failed to take get no proposals.
    """

    def __init__(self, drafters: Sequence[Drafter], rows: RequestRows):
        self.drafters, self.rows = list(drafters), rows
        self.observes = any(drafter.observes for drafter in drafters)
        self.extends = any(drafter.extends for drafter in drafters)
        self.takes_running = all(drafter.takes_running for drafter in drafters)
        self.records = sorted({number for drafter in drafters for number in drafter.records})
        self._lost: set[int] = set()  # rows
        self._is_logged = False

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return any(drafter.reads for drafter in self.drafters if drafter.records)

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        if self.records and isinstance(models[0], torch.nn.Module):  # not asleep
            models[0].record_hidden_states(self.records)
        for drafter in self.drafters:
            drafter.use_models(models)

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self._lost.discard(row)
        for drafter in self.drafters:
            self._call(drafter, drafter.enter, row, tokens, scope)

    def leave(self, row: int) -> None:
        for drafter in self.drafters:
            self._call(drafter, drafter.leave, row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        for drafter in self.drafters if row not in self._lost else ():
            self._call(drafter, drafter.extend, row, tokens)

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        for drafter in self.drafters:
            self._call(drafter, drafter.observe, plan, step)

    def sleep(self) -> None:
        self._lost.clear()
        for drafter in self.drafters:
            self._call(drafter, drafter.sleep)

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        proposals: dict[int, list[int]] = {}
        for drafter in self.drafters:
            left = limits
            if proposals or self._lost:
                taken = self._lost.union(row for row, drafts in proposals.items() if drafts)
                left = {row: limit for row, limit in limits.items() if row not in taken}
            found = self._call(drafter, drafter.propose_all, left) or {}
            if not drafter.is_checked:
                found = self._call(drafter, self._valid, found, left) or {}
            proposals |= found
        return proposals

    def _valid(
        self, proposals: dict[int, list[int]], limits: dict[int, int]
    ) -> dict[int, list[int]]:
        """Each up to its limit, or to the first that is no token."""
        valid, size = {}, self.rows.vocab_size
        for row, drafts in proposals.items():
            if not drafts:
                continue
            tokens = list(map(int, drafts[: limits[row]]))
            if tokens and not (min(tokens) >= 0 and max(tokens) < size):
                del tokens[
                    next(index for index, token in enumerate(tokens) if not 0 <= token < size) :
                ]
            valid[row] = tokens
        return valid

    def _call(self, drafter: Drafter, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns, or None if it failed. A first argument that is a number is a row."""
        try:
            return method(*arguments)
        except LOST:
            raise
        except Exception as error:
            self._lost.update(row for row in arguments[:1] if isinstance(row, int))
            if not self._is_logged:
                log.error("the drafter %s failed; some requests get no draft tokens", type(drafter).__name__, exc_info=error)  # fmt: skip
                self._is_logged = True
            return None
