"""DraftLength: how many draft tokens each row gets, so that a step yields the most tokens for its time.

Knows how many draft tokens were accepted, and how long steps and drafters took. Does not know tokens. Nothing that it
decides can change a token, so it may follow the clock.

A draft token at place j of a row is accepted with probability a^j, where a is the row's mean of late, and a part of that mean's
standard deviation: a row that turns out to be right goes on, and another stops soon. A draft token is worth its
place if it adds more tokens than the rest of the step would produce in the time that it adds. Where none is, as under load,
rows still get one now and then (a probe), so that a change is noticed; probes may take PROBE_SHARE of the time. A drafter's
model computes the tokens that it lacks before a probe, so the rows that lack the fewest have theirs first.

All that is a prediction. Whether draft tokens make the engine faster at all is measured (`measured_gain.py`). Where they do not
for long, nothing is looked for (`sleeps`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Set

from quire.features.speculation.acceptance import Acceptance
from quire.features.speculation.drafter import NEVER
from quire.features.speculation.measured_gain import CHECK_STEPS, MeasuredGain
from quire.features.speculation.measured_times import MeasuredPasses, MeasuredTimes

LEAST_GAIN = 0.05  # tokens that a draft token must add on average: it costs time that the steps' times do not show
PROBE_SHARE = 0.01
LEAST_PROBE, MOST_PROBE = 0.05, 4  # the cost of a probe, in steps
CATCH_UP_WEIGHT = 1 / 32  # of a drafting step's time for prompts
CATCH_UP_KEPT = 0.999  # of its mean, with each step: a drafter that it made too slow is tried again
LACKING = 8  # so many tokens that a drafter's model lacks take the time of a pass
KEEP_PRICES = 64  # steps
MEASURED = 0.75  # the speed of draft tokens that a short turn measures
SLEEP_AFTER = 256  # steps of turns without draft tokens
NO_COST = 0.01  # a drafter that takes less of a step's time is free
MAX_REST = 64  # steps in which no draft tokens are looked for


class DraftLength:
    """One for each worker.

    Args:
        most: `num_speculative_tokens`.
        fixed: always propose as many.
        looks_up: some drafter proposes without a model.
    """

    def __init__(self, most: int, fixed: bool = False, looks_up: bool = True):
        self.most, self.fixed, self.looks_up = most, fixed, looks_up
        self._acceptance, self._of_unsure = Acceptance(), Acceptance()
        self._unsure: set[int] = set()  # rows whose drafter was unsure of its last proposal
        self._gain = MeasuredGain()
        # of a chain, in the turns without draft tokens of its model
        self._look_ups = MeasuredGain(CHECK_STEPS)
        self._plain = MeasuredTimes()  # of steps without draft tokens, by `_size` of their rows
        self._steps = MeasuredTimes()  # of the others, by `_size` of their tokens
        self._has_model = False  # some drafter computed proposals
        self._drafts = MeasuredPasses()  # of proposals where the model lacked few tokens
        self._each_lacked = MeasuredTimes()  # of a token that its model lacked
        self._catch_up = 0.0  # seconds of late that proposals took for prompts, by step
        self._prices: dict[int, float] = {}  # by number of rows, as of late
        # As of late: of steps, by rows and draft tokens; of proposals, by passes and rows.
        self._times: dict[tuple[int, int], float] = {}
        self._draft_times: dict[tuple[int, int], float] = {}
        # of a row alone, by its acceptance in twentieths, its proposals and the number of rows, as of late
        self._lengths: dict[tuple[int, int, int], int] = {}
        self._num_timed = 0
        self._spare = self._income = 0.0  # seconds that probes may take, and that each step adds
        self._probes: set[int] = set()  # rows whose draft token is a probe
        self._vain = 0  # how often none were found, one after the other
        self.rest = 0  # steps that will rest, if no request enters
        self._tries, self.checks = True, False  # as `MeasuredGain`, in the last step
        self._slow = 0  # steps, since draft tokens were tried
        self.pays = True  # in the last step some rows got draft tokens that are no probes
        self.of_model: dict[int, int] = {}  # as `limits`, what a model's passes pay for

    def enter(self, row: int) -> None:
        self._acceptance.enter(row)
        self._of_unsure.enter(row)
        may_offer = self.looks_up or self.pays or self.checks  # its text may, or a model
        if self._looks_up_beside_model or (self._tries and may_offer):
            self._vain, self.rest = self._vain // 2, 0

    @property
    def _looks_up_beside_model(self) -> bool:
        """Of a chain: the turns of `_gain` without draft tokens are those without draft tokens of its model."""
        return self.looks_up and self._has_model

    def learn(self, row: int, drafts: int, accepted: int) -> None:
        """`accepted` of a row's draft tokens were right."""
        self._about(row).learn(row, drafts, accepted)

    def timed(self, num_rows: int, tokens: int, seconds: float) -> None:
        """A step that drew in all its rows took so long. `tokens`: with draft tokens, and those of prompts."""
        if tokens > 2 * num_rows * (1 + self.most):
            return  # most were those of a prompt
        times = self._plain if tokens == num_rows else self._steps
        self._num_timed += 1
        if times.learn(_size(tokens), seconds) or self._num_timed % KEEP_PRICES == 0:
            self._prices.clear()
            self._times.clear()
            self._draft_times.clear()
            self._lengths.clear()
        self._income = PROBE_SHARE * seconds
        self._save()

    def _save(self) -> None:
        self._catch_up *= CATCH_UP_KEPT
        self._spare = min(self._spare + self._income, MOST_PROBE / PROBE_SHARE * self._income)

    def drafted(self, seconds: float, num_rows: int, passes: int, lacked: int = 0) -> None:
        """A drafter computed proposals for rows in so many passes of its model, and `lacked` tokens more, as of a prompt."""
        more, self._has_model = 0.0, True
        if lacked:
            each = max(seconds - self._draft_time(passes, num_rows), 0.0) / lacked
            if not self._each_lacked.learn(1, each):  # the first call of a model is slow
                more = lacked * self._each_lacked(1)
        else:
            least = self._drafts.learn(passes, num_rows, seconds)
            more = min(seconds - least, least)
        if self.pays:
            self._catch_up += CATCH_UP_WEIGHT * (more - self._catch_up)
        else:
            self._spare -= seconds

    def spent(self, num_rows: int, steps: int, tokens: float, seconds: float) -> None:
        """The steps since the last look, this one included, drew so many tokens."""
        begins = False
        if self._looks_up_beside_model and not self._gain.turn(num_rows)[0]:
            is_short = self._look_ups.turn(num_rows)[1]
            ends = self._look_ups.spent(num_rows, steps, tokens, seconds)
            begins = ends and self._look_ups.turn(num_rows)[0]
            if is_short:
                seconds = 0.0  # the model's draft tokens must beat the better way
        ends = self._gain.spent(num_rows, steps, tokens, seconds)
        tries, is_short = self._gain.turn(num_rows)
        if begins or (tries and ends):
            self._vain = self.rest = 0
        self._slow = 0 if tries or is_short or self._looks_up_beside_model else self._slow + steps

    @property
    def sleeps(self) -> bool:
        """Whether no draft tokens are likely soon, so that the drafter need not follow the requests."""
        return self._slow >= SLEEP_AFTER and not self.fixed

    # -- where looking for draft tokens takes a part of a step's time
    def rests(self) -> bool:
        """Whether this step looks for none."""
        if not self.rest:
            return False
        self.rest -= 1
        self._save()
        return True

    def looked(self, found: bool, num_rows: int, seconds: float) -> None:
        """A step looked for draft tokens. The longer none are found, the more steps rest, up to NO_COST of the time.

        Where draft tokens do not pay, which the text does not change, they rest up to a quarter of that.
        """
        self._vain = 0 if found or self.fixed else min(self._vain + 1, 2 * MAX_REST)
        if self._vain >= 4:
            free = NO_COST if self.pays or self.looks_up else NO_COST / 4
            worth = seconds / (free * self._time(num_rows))
            self.rest = min(MAX_REST, self._vain, int(worth))

    # -- before drafting
    def limits(
        self, room: dict[int, int], lacking: Callable[[int], float] = lambda row: 0
    ) -> dict[int, int]:
        """The most draft tokens that may pay off, at most `room`, for the rows that get any.

        `lacking`: how many tokens of a row the drafter's model has not computed.
        """
        self._probes = set()
        if self.fixed or not room:
            self.of_model = {row: min(left, self.most) for row, left in room.items() if left > 0}
            return self.of_model
        tries, self.checks = self._gain.turn(len(room))
        self._tries, self.of_model = tries, {}
        looks = self._looks_up_beside_model and self._look_ups.turn(len(room))[0]
        if not (tries or looks):
            self.pays, self._vain = False, max(self._vain, MAX_REST)
            return {}
        least, limits = max(self._price(len(room)), LEAST_GAIN), {}
        for row, left in room.items():
            if left > 0 and self._acceptance.of[row] >= least:
                limits[row] = min(left, self._places(row, least))
        paid = limits
        if self._has_model:
            paid = {row: limit for row, limit in limits.items() if lacking(row) < NEVER}
            if not tries:
                paid = {}
            elif self._catch_up + self._draft_time(1, len(paid)) > NO_COST * self._time(len(room)):
                depth = self._best_depth(paid, len(room))
                paid = {row: min(limit, depth) for row, limit in paid.items()} if depth else {}
        self.pays = bool(paid)
        if tries and len(paid) < len(room) and self._spare >= self._least_probe(len(room)):
            idle = {row: lacking(row) for row, left in room.items() if left > 0 and row not in paid}
            self._probes = self._affordable(len(room), idle)
        self.of_model = paid | dict.fromkeys(self._probes, 1) if self._probes else paid
        found = self.of_model
        if self.looks_up and found is not limits:
            found = found | limits
        if not found:
            self._vain = max(self._vain, MAX_REST)  # it is not the texts that offer none
        return found

    def _places(self, row: int, least: float) -> int:
        """How many places add at least so many tokens each."""
        accepted = self._acceptance.of[row]
        if accepted >= 1:
            return self.most
        return min(self.most, int(math.log(least) / math.log(accepted)))

    def _price(self, num_rows: int) -> float:
        """Tokens that rows produce in the time that a draft token adds to their step, at the best number of these."""
        if num_rows not in self._prices:
            base, most = self._time(num_rows), num_rows * (1 + self.most)
            larger = self._steps.sizes(num_rows + 1, most) | {2 * num_rows, most}
            more = [size - num_rows for size in larger]
            each = min((self._time(num_rows, drafts) - base) / drafts for drafts in more)
            self._prices[num_rows] = each * num_rows / base
        return self._prices[num_rows]

    def _best_depth(self, limits: dict[int, int], num_rows: int) -> int:
        """How many passes of a drafter's model, for all rows with a limit, give the most tokens a second."""
        expected, count = float(num_rows), 0
        # A short turn also measures what seems not to pay, if it is not far from it.
        least = MEASURED if self.checks else 1.0
        best, best_rate = 0, least * expected / self._time(num_rows)
        for depth in range(1, max(limits.values(), default=0) + 1):
            rows = [row for row, limit in limits.items() if limit >= depth]
            expected += sum(self._acceptance.of[row] ** depth for row in rows)
            count += len(rows)
            seconds = self._catch_up + self._draft_time(depth, len(limits))
            if (rate := expected / (self._time(num_rows, count) + seconds)) > best_rate:
                best, best_rate = depth, rate
        return best

    def _least_probe(self, num_rows: int) -> float:
        """Seconds that must be there for one: of a row that lacks nothing, at most a step."""
        base = self._time(num_rows)
        return min(LEAST_PROBE * base + self._draft_time(1, 1), base)

    def _affordable(self, num_rows: int, idle: dict[int, float]) -> set[int]:
        """The rows that get a probe, of `idle` with the tokens that each lacks. `drafted` says what the drafter took."""
        found: list[int] = []
        base, tokens, price = self._time(num_rows), 0.0, 0.0
        for row in sorted(idle, key=idle.__getitem__):
            tokens += idle[row]
            larger = max(self._time(num_rows, len(found) + 1) - base, LEAST_PROBE * base)
            cost = larger + self._draft_time(1, 1) * (1 + tokens / LACKING)
            if cost > MOST_PROBE * base or self._spare < min(cost, base):
                break
            found.append(row)
            price = larger
        self._spare -= price
        return set(found)

    # -- after drafting
    def cut(
        self, proposals: dict[int, list[int]], num_rows: int, unsure: Set[int] = frozenset()
    ) -> None:
        """Shorten the proposals to the draft tokens that pay off together, and probes.

        Args:
            num_rows: of the step.
            unsure: rows as in `Drafter.unsure`.
        """
        if self._unsure or unsure:
            self._unsure = self._unsure.difference(proposals).union(unsure)
        if self.fixed or not proposals:
            return
        if len(proposals) == 1:
            ((row, drafts),) = proposals.items()
            del drafts[max(self._best_length(row, len(drafts), num_rows), row in self._probes) :]
            return
        gains = self._gains(proposals)
        most = self._best_count(num_rows, [gain for gain, _, _ in gains])
        lengths = {row: int(row in self._probes) for row in proposals}
        for _, row, place in gains[:most]:
            lengths[row] = max(lengths[row], place)
        for row, drafts in proposals.items():
            del drafts[lengths[row] :]

    def _about(self, row: int) -> Acceptance:
        return self._of_unsure if row in self._unsure else self._acceptance

    def _best_length(self, row: int, most: int, num_rows: int) -> int:
        """How many draft tokens of a row pay off, if no other row has any."""
        about = int(20 * self._about(row).of[row] + 0.5), most, num_rows
        if (found := self._lengths.get(about)) is None:
            accepted = about[0] / 20
            gains = [accepted**place for place in range(1, most + 1)]
            gains = [gain for gain in gains if gain >= LEAST_GAIN]
            found = self._lengths[about] = self._best_count(num_rows, gains)
        return found

    def _best_count(self, num_rows: int, gains: list[float]) -> int:
        """How many of the draft tokens, in this order, give the most tokens a second."""
        best, best_rate = 0, num_rows / self._time(num_rows)
        totals = list(itertools.accumulate(gains, initial=float(num_rows)))
        count, most = 0, len(gains)
        while count < most:
            # those of one size take the same time
            count = min(_size(num_rows + count + 1) - num_rows, most)
            if (rate := totals[count] / self._time(num_rows, count)) > best_rate:
                best, best_rate = count, rate
        return best

    def _gains(self, proposals: dict[int, list[int]]) -> list[tuple[float, int, int]]:
        """For each draft token: the tokens that it adds on average, its row and its place; the most first."""
        found = []
        for row, drafts in proposals.items():
            accepted = gain = self._about(row).of[row]
            for place in range(1, len(drafts) + 1):
                if gain < LEAST_GAIN:
                    break
                found.append((gain, row, place))
                gain *= accepted
        found.sort(reverse=True)
        return found

    def _time(self, num_rows: int, drafts: int = 0) -> float:
        """Seconds of a step. Draft tokens of fewer rows may have taken less time than so many rows do without any."""
        if (found := self._times.get((num_rows, drafts))) is None:
            found = self._plain(_size(num_rows), self._steps(_size(num_rows), unknown=1.0))
            if drafts:
                found = self._steps(_size(num_rows + drafts), first=(num_rows, found))
            self._times[num_rows, drafts] = found
        return found

    def _draft_time(self, passes: int, num_rows: int) -> float:
        """Seconds of a drafter's proposals."""
        if (found := self._draft_times.get((passes, num_rows))) is None:
            found = self._draft_times[passes, num_rows] = self._drafts(passes, num_rows)
        return found


def _size(tokens: int) -> int:
    """A number of tokens, rounded up to four significant bits."""
    step = 1 << max(tokens.bit_length() - 4, 0)
    return -(-tokens // step) * step
