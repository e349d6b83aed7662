"""SpeculationController: how many draft tokens each row gets, and whether a batch of its size gets any.

Knows rows, accepted draft tokens and seconds. Does not know tokens, so nothing that it decides can change a token.

Length. Draft token number k of a row is accepted with probability a^k; a is the row's acceptance, a moving average. A row gets
draft tokens as long as a^k is at least the price: the tokens that the rows of the step would have produced in the time that one
draft token adds.

On or off. For each batch size (powers of two), windows of steps with draft tokens and windows without take turns. The way with
more tokens per second gets windows that double in length; the other way gets short trials: without draft tokens the shorter, the
faster draft tokens are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_ACCEPTANCE = 0.6
ROW_DECAY, MEAN_DECAY = (
    0.8,
    0.98,
)  # of a row's acceptance and of the mean, with each draft token that was tried
FIRST_PRICE, LEAST_PRICE = 0.3, 0.05  # tokens; a draft token costs host time that no step shows
TIME_WEIGHT = 1 / 16  # of a step in the moving averages of seconds
PROBE_EVERY = 16  # steps: then rows that get no draft tokens get 1
COLD_STEPS = 32  # the first steps of a process are slow
PLAIN_STEPS, TRIAL_STEPS, FIRST_STEPS, MAX_STEPS = 16, 64, 256, 4096  # of a window
NO_DRAFTS = (
    1 / 4
)  # a step without draft tokens in a window that has them counts as this part of a step
LEAST_GAIN = 1.02  # draft tokens must be faster by this factor
SLEEP_STEPS = (
    64  # a drafter sleeps through windows without draft tokens that are at least this long
)


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds of windows of one way; older windows count half."""

    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _BatchSize:
    """What is known of steps with a number of rows.

    Attributes:
        speculates: the current window has draft tokens.
        left: steps of it.
        window: steps of the last window of the better way.
        best: whether draft tokens were faster; None: not measured.
        plain_s, drafted_s: mean seconds of a step without prompt tokens: without and with draft tokens.
        num_drafts: mean draft tokens of the second.
        prompt_s: mean seconds of a step with prompt tokens.
    """

    speculates: bool = False
    left: float = PLAIN_STEPS
    window: int = FIRST_STEPS
    best: bool | None = None
    plain_s: float = 0.0
    drafted_s: float = 0.0
    num_drafts: float = 0.0
    prompt_s: float = 0.0
    rates: dict[bool, _Rate] = field(default_factory=lambda: {True: _Rate(), False: _Rate()})

    def measure(self, num_drafts: int, seconds: float, decodes: bool) -> float:
        """A step took `seconds`. Returns them, at most twice the mean: longer is an interruption, as when the engine is paused."""
        if not decodes:
            seconds = min(seconds, 2 * self.prompt_s or seconds)
            self.prompt_s = _moved(self.prompt_s, seconds)
        elif num_drafts:
            seconds = min(seconds, 2 * self.drafted_s or seconds)
            self.drafted_s = _moved(self.drafted_s, seconds)
            self.num_drafts = _moved(self.num_drafts, num_drafts)
        elif not self.speculates:
            seconds = min(seconds, 2 * self.plain_s or seconds)
            self.plain_s = _moved(self.plain_s, seconds)
        return seconds

    def next_window(self) -> None:
        drafted, plain = self.rates[True], self.rates[False]
        if not plain.seconds:
            self.left = PLAIN_STEPS
            return
        if not drafted.seconds:
            self.speculates, self.left = True, TRIAL_STEPS
            return
        gain = drafted.tokens * plain.seconds / (plain.tokens * drafted.seconds)
        best = gain > LEAST_GAIN
        if self.speculates is best and self.best is best:
            self.speculates, self.left = not best, PLAIN_STEPS / gain if best else TRIAL_STEPS
        else:
            self.window = min(2 * self.window, MAX_STEPS) if self.best is best else FIRST_STEPS
            self.speculates, self.left, self.best = best, self.window, best
        following = self.rates[self.speculates]
        following.tokens, following.seconds = following.tokens / 2, following.seconds / 2


class SpeculationController:
    """One for each worker.

    Args:
        max_drafts: `num_speculative_tokens`.
        fixed: every row always gets this many (`adaptive: false`).
    """

    def __init__(self, max_drafts: int, fixed: bool = False):
        self.max_drafts, self.fixed = max_drafts, fixed
        self.acceptance: dict[int, float] = {}  # by row
        self._mean = FIRST_ACCEPTANCE
        self._sizes: dict[int, _BatchSize] = {}  # by bit length of the number of rows
        self._steps = 0

    def enter(self, row: int) -> None:
        self.acceptance[row] = self._mean

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """A step accepted `num_accepted` of a row's draft tokens; those after the first wrong one say nothing."""
        tried = min(num_drafts, num_accepted + 1)
        share = num_accepted / tried
        kept = ROW_DECAY**tried
        self.acceptance[row] = kept * self.acceptance[row] + (1 - kept) * share
        kept = MEAN_DECAY**tried
        self._mean = kept * self._mean + (1 - kept) * share

    def speculates(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows has draft tokens."""
        return self.fixed or self._of(num_rows).speculates

    def sleeps(self, num_rows: int) -> bool:
        """Whether no step of `num_rows` rows has draft tokens for long."""
        size = self._of(num_rows)
        return not (self.fixed or size.speculates) and size.left >= SLEEP_STEPS

    def limits(self, room: dict[int, int]) -> dict[int, int]:
        """By row that gets draft tokens: how many, at most `room`."""
        if self.fixed or not room:
            return {row: min(left, self.max_drafts) for row, left in room.items() if left > 0}
        size, probes = self._of(len(room)), self._steps % PROBE_EVERY == 0
        if not size.speculates:
            return {}
        price = math.log(self._price(size, len(room)))
        limits: dict[int, int] = {}
        for row, left in room.items():
            accepted = self.acceptance[row]
            if accepted >= 1.0:
                count = self.max_drafts
            elif accepted > 0.0:
                count = min(int(price / math.log(accepted)), self.max_drafts)
            else:
                count = 0
            if (count := min(count or probes, left)) > 0:
                limits[row] = count
        return limits

    def record(
        self, num_rows: int, num_tokens: int, num_drafts: int, seconds: float, decodes: bool
    ) -> None:
        """Record one step.

        Args:
            num_rows: rows that drew.
            num_tokens: tokens that they got.
            num_drafts: draft tokens that the step verified.
            seconds: since the step before; 0: unknown.
            decodes: it computed no prompt tokens.
        """
        self._steps += 1
        size = self._of(num_rows)
        if self._steps > COLD_STEPS and seconds:
            seconds = size.measure(num_drafts, seconds, decodes)
            rate = size.rates[size.speculates]
            rate.tokens, rate.seconds = rate.tokens + num_tokens, rate.seconds + seconds
        used = 1.0
        if size.speculates:  # slow draft tokens have fewer steps
            used = max(seconds / size.plain_s, 1.0) if num_drafts and size.plain_s else NO_DRAFTS
        size.left -= used
        if size.left <= 0:
            size.next_window()

    def skip(self, num_rows: int, num_steps: int) -> None:
        """`num_steps` steps ran while the drafter slept."""
        size = self._of(num_rows)
        size.left = max(size.left - num_steps, 1)

    def _price(self, size: _BatchSize, num_rows: int) -> float:
        if not (size.plain_s and size.num_drafts) or size.best is False:
            return FIRST_PRICE  # a trial measures draft tokens that may pay
        added_s = max(size.drafted_s - size.plain_s, 0.0) / size.num_drafts
        return min(max(num_rows * added_s / size.plain_s, LEAST_PRICE), 1.0)

    def _of(self, num_rows: int) -> _BatchSize:
        return self._sizes.setdefault(num_rows.bit_length(), _BatchSize())


def _moved(mean: float, value: float) -> float:
    """The moving average."""
    return value if not mean else mean + TIME_WEIGHT * (value - mean)
