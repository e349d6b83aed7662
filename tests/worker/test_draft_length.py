"""How many draft tokens pay: by what was accepted, and by what steps and drafters cost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from quire.features.speculation import measured_times as module
from quire.features.speculation.draft_length import DraftLength
from quire.features.speculation.drafter import NEVER
from quire.features.speculation.measured_times import MeasuredTimes

Cost = Callable[[int], float]


def flat(tokens: int) -> float:
    """A device that reads weights: up to 16 tokens take the time of one."""
    return 1.0 + max(tokens - 16, 0) / 16


def steep(tokens: int) -> float:
    """A device that computes: each token takes time."""
    return 0.1 + tokens / 10


def simulated(
    cost: Cost, rows: int, right: float, *, steps: int = 3000, most: int = 5, drafting: float = 0.0
) -> tuple[float, float]:
    """Tokens a second relative to a server without draft tokens, and the draft tokens of a row and step at the end."""
    length, draw = DraftLength(most, looks_up=not drafting), random.Random(1)
    for row in range(rows):
        length.enter(row)
    drafts, tokens, seconds, late = dict.fromkeys(range(rows), 0), 0, 0.0, 0
    for step in range(steps):
        size, accepted = rows + sum(drafts.values()), {}
        for row, count in drafts.items():
            if count:
                accepted[row] = next((n for n in range(count) if draw.random() >= right), count)
                length.learn(row, count, accepted[row])
        took = cost(size) * draw.choice([1.0, 1.0, 1.1])
        length.timed(rows, size, took)
        limits = length.limits(dict.fromkeys(range(rows), most))
        if limits and drafting:
            passes = max(limits.values())
            length.drafted(passes * drafting, rows, passes)
            took += passes * drafting
        proposals = {row: [1] * limits.get(row, 0) for row in range(rows)}
        length.cut(proposals, len(proposals))
        drafts = {row: len(found) for row, found in proposals.items()}
        tokens, seconds = tokens + rows + sum(accepted.values()), seconds + took
        length.spent(rows, 1, rows + sum(accepted.values()), took)
        late += sum(drafts.values()) * (step >= steps - 500)
    plain = rows / (cost(rows) * 31 / 30)
    return tokens / seconds / plain, late / 500 / rows


def test_right_draft_tokens_pay_where_steps_read_weights() -> None:
    speed, drafts = simulated(flat, 1, 0.9)
    assert speed > 2.5
    assert drafts > 4


def test_wrong_draft_tokens_cost_next_to_nothing() -> None:
    for cost in (flat, steep):
        for rows in (1, 4, 16, 32):
            speed, drafts = simulated(cost, rows, 0.0)
            assert speed > 0.97, (cost, rows)
            assert drafts < 0.3, (cost, rows)


def test_under_load_rows_get_none_unless_they_pay() -> None:
    speed, drafts = simulated(steep, 32, 0.6)
    assert speed > 0.97
    assert drafts < 0.1
    assert simulated(flat, 4, 0.6)[0] > 1.3


def test_a_drafter_that_takes_long_is_asked_less() -> None:
    assert simulated(flat, 1, 0.8, drafting=0.05)[0] > 1.8
    speed, drafts = simulated(flat, 1, 0.8, drafting=5.0)
    assert speed > 0.9
    assert drafts < 0.1


def test_draft_tokens_come_back_when_they_are_right_again() -> None:
    length = DraftLength(4)
    length.enter(0)
    got = []
    for step in range(600):
        length.timed(1, 1 + (got[-1] if got else 0), 1.0)
        if got and got[-1]:
            length.learn(0, got[-1], 0 if step < 300 else got[-1])
        proposals = {0: [1] * length.limits({0: 4}).get(0, 0)}
        length.cut(proposals, len(proposals))
        got.append(len(proposals[0]))
    assert sum(got[200:300]) < 60
    assert got[-50:].count(4) >= 49  # a step without draft tokens measures what these must beat


def test_the_time_without_draft_tokens_is_learnt() -> None:
    """Of steps that all had some, however many rows there are."""
    length = DraftLength(3)
    rows = dict.fromkeys(range(32), 3)
    for row in rows:
        length.enter(row)
    seen = []
    for _ in range(40):
        seen.append(sum(length.limits(rows).values()))
        length.timed(32, 32 + seen[-1], steep(32 + seen[-1]))
        length.spent(32, 1, 32, steep(32 + seen[-1]))
    assert seen.count(0) >= 1
    assert seen[-1] == 0  # they do not pay here


def test_larger_steps_are_taken_to_cost_more_as_they_did_before() -> None:
    length = DraftLength(4)
    for row in range(32):
        length.enter(row)
    for tokens in (32, 64):
        length.timed(32, tokens, steep(tokens))
    assert length.limits(dict.fromkeys(range(32), 4)) == {}


def test_a_fixed_number_stays() -> None:
    length = DraftLength(3, fixed=True)
    length.enter(0)
    for _ in range(50):
        length.timed(1, 4, 1.0)
        length.learn(0, 3, 0)
    assert length.limits({0: 9, 1: 2}) == {0: 3, 1: 2}
    proposals = {0: [1, 2, 3]}
    length.cut(proposals, len(proposals))
    assert proposals == {0: [1, 2, 3]}


def test_steps_rest_where_looking_for_draft_tokens_takes_time_and_finds_none() -> None:
    length = DraftLength(4)
    length.enter(0)
    length.timed(1, 1, 1e-3)

    def looked(found: bool, seconds: float) -> int:
        """Steps that rest behind this one."""
        length.looked(found, 1, seconds)
        return next(n for n in range(99) if not length.rests())

    rests = [looked(False, 1e-4) for _ in range(100)]
    assert rests[:3] == [0] * 3
    assert rests == sorted(rests)
    assert rests[-1] == 10  # looking takes a tenth of a step, so a hundredth of eleven
    assert looked(False, 1e-6) == 0
    assert looked(True, 1e-4) == looked(False, 1e-4) == 0
    for _ in range(9):
        length.looked(False, 1, 1e-4)
    length.enter(1)
    assert not length.rests()


def test_a_slow_first_run_does_not_count_whole() -> None:
    times = MeasuredTimes()
    times.learn(1, 1.0)
    times.learn(4, 50.0)
    assert (times(2), times(4)) == (1 + 3 / 3, 4.0)  # two were expected
    for _ in range(60):
        times.learn(4, 8.0)
    assert 7.5 < times(4) < 8.0
    times.learn(4, 3.0)
    assert times(4) == 3.0


def test_a_time_that_was_measured_once_is_forgotten() -> None:
    """The machine may have been slow: steps of that size would never run again."""
    times = MeasuredTimes()
    for size in (1, 4, 8):
        times.learn(size, 1.0)
        times.learn(size, 1.0)
    times.learn(6, 2.0)
    assert times(6) == 1.0  # no more than a larger step
    times.learn(16, 9.0)
    assert times(16) == 2.0
    for _ in range(2 * module.KEPT_ONCE):
        times.learn(4, 1.0)
    assert times.sizes(1, 99) == {1, 4, 8}
    for _ in range(2 * module.KEPT):
        times.learn(4, 1.0)
    assert times.sizes(1, 99) == {4}


def test_the_prompts_that_a_drafter_computes_count_as_its_cost() -> None:
    """Drafts of short answers behind long prompts do not pay, where those of long answers do."""

    def drafted(prompt: float) -> int:
        length, found = DraftLength(3, looks_up=False), 0
        length.enter(0)
        for step in range(400):
            length.timed(1, step % 4 + 1, 1.0)
            if limits := length.limits({0: 3}):
                length.drafted(0.3, 1, 3)
                if step % 10 == 0:
                    length.drafted(prompt, 1, 1, 150)
            found += sum(limits.values())
            length.learn(0, 3, 2)
        return found

    assert drafted(0.4) > 1000
    assert drafted(60.0) < 400


def test_where_a_model_does_not_pay_look_ups_go_on() -> None:
    found = {}
    for looks_up in (True, False):
        length = DraftLength(3, looks_up=looks_up)
        length.enter(0)
        for step in range(50):
            length.timed(1, step % 4 + 1, 1.0)
            limits = length.limits({0: 3})
            length.drafted(9.0, 1, 1)
            length.looked(False, 1, 9.0)
        found[looks_up] = limits, length.of_model
        assert not length.pays
    assert found == {True: ({0: 3}, {}), False: ({}, {})}


def test_passes_limit_a_model_and_no_look_up() -> None:
    length = DraftLength(3)
    length.enter(0)
    for tokens in (1, 4):
        length.timed(1, tokens, 1.0)
    length.drafted(0.5, 1, 1)
    found = length.limits({0: 3})
    assert (found, length.of_model) == ({0: 3}, {0: 1})


def test_rows_that_lack_the_fewest_tokens_get_probes() -> None:
    """And none gets one that takes longer than a few steps. All probes together take a hundredth of the time."""
    length, lacking = DraftLength(4), {0: 2, 1: 20, 2: 4000}
    rows = dict.fromkeys(lacking, 4)
    for row in rows:
        length.enter(row)
        for _ in range(40):
            length.learn(row, 4, 0)
    probed, drafting = dict.fromkeys(rows, 0), 0.0
    length.drafted(0.2, 1, 1)
    for _ in range(3000):
        length.timed(3, 3, 1.0)
        if limits := length.limits(rows, lacking.__getitem__):
            assert set(limits.values()) == {1}
            took = 0.2 * (1 + sum(lacking[row] for row in limits) / 8)
            length.drafted(took, len(limits), 1, 8)
            drafting += took
            for row in limits:
                probed[row] += 1
    assert probed[0] >= probed[1]
    assert probed[0] > 20
    assert probed[2] == 0
    assert drafting < 0.011 * 3000


def test_the_first_draft_tokens_say_soon_how_many_are_right() -> None:
    """Of ten, all right: a new row gets draft tokens where those of START would not pay."""
    length = DraftLength(4)
    for row in range(2):
        length.enter(row)
    for tokens in (1, 5):
        length.timed(1, tokens, 1.0 + 0.8 * (tokens - 1))
    assert length.limits({0: 4}) == {}
    for _ in range(10):
        length.learn(1, 4, 4)
    length.enter(2)
    assert length.limits({2: 4}) == {2: 4}


@pytest.mark.parametrize(
    ("model", "look_ups", "nothing"), [(0.8, 0.9, 1.0), (0.8, 1.2, 1.0), (1.5, 1.2, 1.0), (1.1, 0.8, 1.0), (1.1, 1.2, 1.0), (0.9, 0.8, 1.0)]
)  # fmt: skip
def test_a_chain_finds_the_fastest_of_its_ways(
    model: float, look_ups: float, nothing: float
) -> None:
    """Tokens a second with draft tokens of its model, with those of look-ups alone, and without any."""
    speeds, counts = {"model": model, "look-ups": look_ups, "nothing": nothing}, Counter[str]()
    length = DraftLength(3)
    length.enter(0)
    length.drafted(0.01, 1, 1)
    for tokens in (1, 4):
        length.timed(1, tokens, 1.0)
    for step in range(12000):
        limits = length.limits({0: 3})
        way = "model" if length.of_model else "look-ups" if limits else "nothing"
        counts[way] += step >= 4000
        length.spent(1, 1, speeds[way], 1.0)
    assert counts[max(speeds, key=speeds.__getitem__)] > 0.85 * counts.total()


def test_a_model_that_always_lacks_prompts_costs_the_time_for_these() -> None:
    """Each request ended after a few tokens. The cost of a pass alone was never seen, so the model seemed to cost nothing."""
    length, found = DraftLength(3), {}
    length.enter(0)
    for tokens in (1, 4):
        length.timed(1, tokens, 1.0)
    for _ in range(100):
        found = length.limits({0: 3})
        if length.of_model:
            length.drafted(9.0, 1, 1, 200)
    assert (found, length.of_model) == ({0: 3}, {})


def test_rows_that_a_model_cannot_propose_for_are_no_reason_to_look() -> None:
    """Requests that keep no states came and went, and each ended the rest of a drafter that had nothing to propose for them."""
    length = DraftLength(3, looks_up=False)
    for tokens in (1, 4):
        length.timed(1, tokens, 1.0)
    length.enter(0)
    length.drafted(0.1, 1, 3)
    while (turn := length._gain.turn(1)) != (True, False):  # until they were faster
        length.spent(1, 1, 1.0 + turn[0], 1.0)
    assert length.limits({0: 3}, lambda row: 2) == {0: 3}
    assert length.limits({0: 3}, lambda row: NEVER) == {}
    assert not length.pays
    length.looked(False, 1, 0.1)
    length.enter(0)
    assert length.rests()


def test_unsure_proposals_have_an_acceptance_of_their_own() -> None:
    length = DraftLength(4)
    length.enter(0)
    for tokens in (1, 5):
        length.timed(1, tokens, 1.0 + 0.5 * (tokens - 1))
    for number in range(40):
        found = {0: [7] * 4}
        length.cut(found, 1, {0} if number % 2 else set())
        length.learn(0, 4, 0 if number % 2 else 4)
    length.enter(2)
    for row in (0, 2):  # a new row starts with what is known of the others
        sure, unsure = {row: [7] * 4}, {row: [7] * 4}
        length.cut(sure, 1)
        length.cut(unsure, 1, {row})
        assert (sure, unsure) == ({row: [7] * 4}, {row: []})
    length.cut({row: [7] for row in (0, 2)}, 2)
    assert length._unsure == set()
