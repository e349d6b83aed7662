"""MeasuredGain: whether draft tokens make the engine faster: it takes turns with them and without, and compares tokens a second.

Knows steps, tokens and seconds. Does not know why a turn was slow. `DraftLength` predicts what pays from the times of single
steps, which leave things out: prompts between them, caches of the processor, tokens behind the end of an answer. This is
the whole, so it has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LOOK_STEPS = 16
"""Of the first turn, which has no draft tokens: how long a step takes, which these must beat."""
FIRST_ROW_STEPS = 256
"""Of the first turn with draft tokens: more requests show sooner what these bring."""
CHECK_STEPS = 64  # of a turn that only compares
FIRST_STEPS, MOST_STEPS = 256, 8192
"""A turn of the better way has twice as many as the first, and then twice as many as the last, while it stays the better one."""
CLEAR_GAIN = 1.25  # then a turn without draft tokens costs much, and is rare
LEAST_GAIN = 1.02  # a short turn without draft tokens keeps what they need
KEPT = 1 - 1 / 128  # of what is known of a way, with each of its steps


@dataclass(slots=True)
class _Rate:
    """Of late, in one way."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, steps: int, tokens: float, seconds: float) -> None:
        kept = KEPT**steps
        self.steps = kept * self.steps + steps
        self.tokens = kept * self.tokens + tokens
        self.seconds = kept * self.seconds + seconds


@dataclass(slots=True)
class _Load:
    """The turns of a number of rows.

    Attributes:
        tries: this turn has draft tokens.
        left: its steps.
        turn: steps of the last turn of the better way.
        best: whether draft tokens were faster, when that was last seen; None: not yet.
    """

    first: int  # steps of the first turn with draft tokens
    tries: bool = True
    left: int = 1
    turn: int = FIRST_STEPS
    best: bool | None = None
    rates: dict[bool, _Rate] = field(default_factory=lambda: {True: _Rate(), False: _Rate()})

    def take_turns(self) -> None:
        tried, plain = self.rates[True], self.rates[False]
        if not plain.steps:
            self.tries, self.left = False, LOOK_STEPS
            return
        if min(tried.steps, plain.steps) < CHECK_STEPS / 2:
            self.tries = tried.steps < plain.steps
            self.left = self.first if self.tries else CHECK_STEPS
            return
        best = tried.tokens * plain.seconds > LEAST_GAIN * plain.tokens * tried.seconds
        if self.tries is best and self.best is best:
            self.tries, self.left = not best, CHECK_STEPS
            return
        if self.best is not best:
            self.turn = FIRST_STEPS
        is_clear = tried.tokens * plain.seconds > CLEAR_GAIN * plain.tokens * tried.seconds
        self.turn = min((8 if is_clear else 2) * self.turn, MOST_STEPS)
        self.tries, self.left, self.best = best, self.turn, best


class MeasuredGain:
    """By number of rows, in powers of two. `first_row_steps`: of the first turn with draft tokens, where one request runs."""

    def __init__(self, first_row_steps: int = FIRST_ROW_STEPS) -> None:
        self.first_row_steps = first_row_steps
        self._loads: dict[int, _Load] = {}

    def turn(self, num_rows: int) -> tuple[bool, bool]:
        """Whether steps of so many rows have draft tokens now; and whether this turn is short, so that the other way is, or may
        be, the better one."""
        load = self._of(num_rows)
        return load.tries, load.best is not load.tries

    def _of(self, num_rows: int) -> _Load:
        if (load := self._loads.get(num_rows.bit_length())) is None:
            first = max(self.first_row_steps // max(num_rows, 1), CHECK_STEPS)
            load = self._loads[num_rows.bit_length()] = _Load(first)
        return load

    def spent(self, num_rows: int, steps: int, tokens: float, seconds: float) -> bool:
        """So many steps drew so many tokens, since the last call. Whether the turn ends. `seconds`: 0 if they are not known."""
        load = self._of(num_rows)
        if seconds:
            load.rates[load.tries].add(steps, tokens, seconds)
        load.left -= steps
        if load.left > 0:
            return False
        load.take_turns()
        return True
