"""DraftLength: how many draft tokens each row gets, so that a step yields the most tokens for its time.

Knows how many draft tokens were accepted, and how long steps took. Does not know tokens. Nothing that it decides can
change a token, so it may follow the clock.

A draft token at place j of a row is accepted with probability a^j, where a is the row's mean of late. It is worth its
place if it adds more tokens than the rest of the step would produce in the time that it adds.
"""

from __future__ import annotations

from collections.abc import Iterable

START = 0.6  # the acceptance that a row has at first
MEMORY = 0.8  # the weight of the past in a row's mean
LEAST_GAIN = 0.05  # tokens that a draft token must add on average: it costs time that the steps' times do not show
PROBE = 32  # a row without draft tokens gets one again after so many steps


class DraftLength:
    """One for each worker.

    Args:
        most: `num_speculative_tokens`.
        fixed: always propose as many.
    """

    def __init__(self, most: int, fixed: bool = False):
        self.most, self.fixed = most, fixed
        self._accepted: dict[int, float] = {}  # by row
        self._without: dict[int, int] = {}  # by row: steps without draft tokens
        # Of a step, by the number of its tokens, rounded up to a power of two.
        self._seconds: dict[int, float] = {}

    def enter(self, row: int) -> None:
        self._accepted[row], self._without[row] = START, 0

    def learn(self, row: int, drafts: int, accepted: int) -> None:
        """`accepted` of a row's draft tokens were right; those after the first wrong one say nothing."""
        shares = accepted / min(drafts, accepted + 1)
        self._accepted[row] = MEMORY * self._accepted[row] + (1 - MEMORY) * shares

    def timed(self, tokens: int, seconds: float) -> None:
        """A step that computed the next tokens of rows, and no prompts, took so long."""
        bucket = _bucket(tokens)
        before = self._seconds.get(bucket, seconds)
        # A slow step may be the machine's fault; the least of late is what the step costs.
        self._seconds[bucket] = min(seconds, before + 0.1 * (seconds - before))

    def cut(self, proposals: dict[int, list[int]]) -> None:
        """Shorten the proposals to the draft tokens that pay off together."""
        if self.fixed:
            return
        gains = sorted(self._gains(proposals), reverse=True)
        most = self._best_count(len(proposals), [gain for gain, _, _ in gains])
        lengths = dict.fromkeys(proposals, 0)
        for _, row, place in gains[:most]:
            lengths[row] = max(lengths[row], place)
        for row, drafts in proposals.items():
            if drafts and not lengths[row]:
                self._without[row] += 1
                lengths[row] = self._without[row] % PROBE == 0
            del drafts[lengths[row] :]

    def _best_count(self, num_rows: int, gains: list[float]) -> int:
        """How many of the draft tokens, in this order, give the most tokens a second."""
        expected = float(num_rows)
        best, best_rate = 0, expected / self._time(num_rows)
        for count, gain in enumerate(gains, 1):
            expected += gain
            if (rate := expected / self._time(num_rows + count)) > best_rate:
                best, best_rate = count, rate
        return best

    def _gains(self, proposals: dict[int, list[int]]) -> Iterable[tuple[float, int, int]]:
        """For each draft token: the tokens that it adds on average, its row and its place."""
        for row, drafts in proposals.items():
            accepted, gain = self._accepted[row], 1.0
            for place in range(1, len(drafts) + 1):
                if (gain := gain * accepted) < LEAST_GAIN:
                    break
                yield gain, row, place

    def _time(self, tokens: int) -> float:
        """Seconds of a step of so many tokens: as measured, else as of the next smaller step that was measured."""
        bucket = _bucket(tokens)
        while bucket and bucket not in self._seconds:
            bucket //= 2
        return self._seconds.get(bucket, 1.0)


def _bucket(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()
