"""DrafterGuard: whatever a drafter does, it costs proposals only.

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
"""The device, or another rank that has a part of the drafter's model: the engine cannot go on."""


class DrafterGuard(Drafter):
    """Logs a drafter's first exception. Rows whose tokens the drafter failed to take get no proposals."""

    def __init__(self, drafter: Drafter, rows: RequestRows):
        self.drafter, self.rows = drafter, rows
        self.records, self.observes, self.reads = drafter.records, drafter.observes, drafter.reads
        self.extends = drafter.extends
        self.takes_running = drafter.takes_running
        self._lost: set[int] = set()  # rows
        self._is_logged = False

    def use_models(self, models: Sequence[LanguageModel]) -> None:
        if self.records and isinstance(models[0], torch.nn.Module):  # not asleep
            models[0].record_hidden_states(self.records)
        self.drafter.use_models(models)

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self._lost.discard(row)
        self._call(self.drafter.enter, row, tokens, scope)
        self.reads = self.drafter.reads

    def leave(self, row: int) -> None:
        self._call(self.drafter.leave, row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        if row not in self._lost:
            self._call(self.drafter.extend, row, tokens)

    def _call(self, method: Callable[..., None], *row: Any) -> None:
        """`row`: and what else the method takes."""
        try:
            method(*row)
        except LOST:
            raise
        except Exception as error:
            self._lost.update(row[:1])
            self._report(error)

    def observe(self, plan: StepPlan, step: ComputedTokens | None) -> None:
        try:
            self.drafter.observe(plan, step)
            self.reads = self.drafter.reads
        except LOST:
            raise
        except Exception as error:
            self._report(error)

    def sleep(self) -> None:
        self._lost.clear()
        self._call(self.drafter.sleep)
        self.reads = self.drafter.reads

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        if self._lost:
            limits = {row: limit for row, limit in limits.items() if row not in self._lost}
        try:
            proposals = self.drafter.propose_all(limits)
            if self.drafter.is_checked:
                return proposals
            return {
                row: self._valid(drafts, limits[row]) for row, drafts in proposals.items() if drafts
            }
        except LOST:
            raise
        except Exception as error:
            self._report(error)
            return {}

    def _valid(self, drafts: Sequence[int], limit: int) -> list[int]:
        """Up to the first that is no token."""
        size = self.rows.vocab_size
        valid = list(map(int, drafts[:limit]))
        if valid and not (min(valid) >= 0 and max(valid) < size):
            del valid[next(at for at, token in enumerate(valid) if not 0 <= token < size) :]
        return valid

    def _report(self, error: Exception) -> None:
        if not self._is_logged:
            log.error("the drafter %s failed; some requests get no draft tokens", type(self.drafter).__name__, exc_info=error)  # fmt: skip
            self._is_logged = True
