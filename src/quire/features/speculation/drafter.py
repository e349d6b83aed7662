"""Drafter: proposes the tokens that may follow a row's tokens. A wrong proposal costs time, and never changes a token.

Knows rows and tokens. Does not know how proposals are verified, or how many pay off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.models.base import LanguageModel


class Drafter:
    """Keeps what it needs of each row's tokens. The base class proposes nothing.

    A class of the user's own (`custom_class`) has these methods too; it is made with the `SpeculativeOptions`.
    `records`: numbers of the target's layers whose output it reads (`LanguageModel.record_hidden_states`).
    """

    records: Sequence[int] = ()

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

    def propose(self, row: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the row's tokens."""
        return []

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        """As `propose`, for several rows with a limit each. A row may be missing: it has no proposal.

        It is called after every step, maybe with no rows.
        """
        return {row: self.propose(row, limit) for row, limit in limits.items()}
