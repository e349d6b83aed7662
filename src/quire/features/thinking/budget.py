"""Thinking budget: after a request's number of thinking tokens, only the marker that ends thinking is allowed.

Knows the markers as tokens (`ThinkingMarkers`). Does not know text. It reads a row's output from the rows, so a
preemption loses no state, and a row that cannot have spent its budget yet costs one comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from quire.protocol.plan import EnteredRow
from quire.protocol.sampling_params import ThinkingMarkers
from quire.worker.sampling.builtin_processors import allow_only
from quire.worker.sampling.logits_processors import Processor, ProcessorRows, allow_only_in_mask


class ThinkingState:
    """How much of its budget one row has used."""

    def __init__(self, marks: ThinkingMarkers, start: int):
        self.marks, self.start = marks, start
        self.read = start  # tokens before this position have been read
        self.within = marks.opened
        self.over = False
        self.spent = 0
        self.lately: list[int] = []  # the last tokens of this part: at most the length of a marker
        self.most = max(map(len, (*marks.starts, *marks.ends)))

    def take(self, tokens: Sequence[int]) -> None:
        """Read more of the output."""
        for token in tokens:
            self.lately = [*self.lately[1 - self.most :], token] if self.most > 1 else [token]
            if self.over:
                continue
            self.spent += self.within
            marks = self.marks.ends if self.within else self.marks.starts
            if any(self.lately[-len(mark) :] == mark for mark in marks):
                self.over = self.within and not self.marks.again
                self.within, self.lately = not self.within, []
        self.read += len(tokens)

    def forced(self) -> int | None:
        """The token that must come now, if any: the next token of the end marker."""
        if not self.within or self.spent < self.marks.budget:
            return None
        mark = self.marks.ends[0]
        for count in range(len(mark) - 1, 0, -1):
            if self.lately[-count:] == mark[:count]:
                return mark[count]
        return mark[0]


class ThinkingBudget(Processor):
    """`thinking_token_budget`."""

    mask_only = True
    accepts_drafts = True
    order = 50

    def __init__(self) -> None:
        self.rows: dict[int, ThinkingState] = {}

    def enter(self, new: EnteredRow) -> bool:
        if (marks := new.sampling_params.thoughts) is None:
            return False
        self.rows[new.row] = ThinkingState(marks, new.num_prompt)
        return True

    def leave(self, row: int) -> None:
        del self.rows[row]

    def apply(self, logits_SV: Tensor, selected: ProcessorRows) -> Tensor:
        for index, token in self._forced(selected):
            allow_only(logits_SV[index], [token])
        return logits_SV

    def mask(self, words_SW: np.ndarray, selected: ProcessorRows) -> None:
        for index, token in self._forced(selected):
            allow_only_in_mask(words_SW[index], [token])

    def _forced(self, selected: ProcessorRows) -> Iterator[tuple[int, int]]:
        """(index in S, token) of rows whose next token is forced."""
        before, one = -1, None
        for index, row, length in zip(
            selected.indices.tolist(),
            selected.rows.tolist(),
            selected.lengths.tolist(),
            strict=True,
        ):
            if one is None or row != before:
                before, one = row, self.rows[row]
            elif one is self.rows[row]:  # after draft tokens, which may be wrong
                one = copy.copy(one)
            if one.over or length - one.start < one.marks.budget:
                continue
            one.take(selected.state.token_ids_RL[row, one.read : length].tolist())
            if (token := one.forced()) is not None:
                yield index, token
