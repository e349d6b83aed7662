"""Drafter: proposes the tokens that may follow a row's tokens. A wrong proposal costs time, and never changes a token.

Knows rows and tokens. Does not know how proposals are verified, or how many pay off.
"""

from __future__ import annotations

from collections.abc import Sequence


class Drafter:
    """Keeps what it needs of each row's tokens. The base class proposes nothing."""

    def enter(self, row: int, tokens: Sequence[int]) -> None:
        """A request takes a row (again, after a preemption), with these tokens."""

    def leave(self, row: int) -> None:
        """The row is freed."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The row has more tokens, which are certain."""

    def propose(self, row: int, limit: int) -> list[int]:
        """At most `limit` tokens that may follow the row's tokens."""
        return []
