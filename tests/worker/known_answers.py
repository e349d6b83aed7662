"""A drafter for tests, which knows the answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quire.features.speculation.drafter import Drafter

TOKENS = 29
"""Wrong tokens are below it; each vocabulary of the tests has as many."""


class KnownAnswers(Drafter):
    """Proposes a part of a row's answer, of whose tokens the share `right` is; wrong tokens where it knows no answer.

    `answers`: by prompt.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        right: float,
        draw: random.Random | None = None,
    ):
        self.answers, self.right, self.draw = answers, right, draw or random.Random(1)
        self.rows: dict[int, list[int]] = {}

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.rows[row] = list(tokens)

    def leave(self, row: int) -> None:
        del self.rows[row]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.rows[row] += tokens

    def propose(self, row: int, limit: int) -> list[int]:
        have = tuple(self.rows[row])
        for prompt, answer in self.answers.items():
            if len(prompt) < len(have) and (*prompt, *answer)[: len(have)] == have:
                known = len(have) - len(prompt)
                follow = answer[known : known + self.draw.randint(0, limit)]
                return [t if self.draw.random() < self.right else self._wrong() for t in follow]
        return [self._wrong() for _ in range(limit)]

    def _wrong(self) -> int:
        return self.draw.randrange(TOKENS)
