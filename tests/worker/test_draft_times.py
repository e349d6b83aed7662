"""Which seconds and tokens the hook of speculation counts for a step, by a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.features.speculation import hook as module
from quire.features.speculation.draft_length import DraftLength
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.hook import COLD_STEPS, IDLE_STEPS, SpeculationHook
from quire.protocol.plan import EnteredRow, StepPlan, WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.request_rows import RequestRows


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class RecordedLength(DraftLength):
    """Keeps what the hook says, and rests as often as the test says."""

    def __init__(self) -> None:
        super().__init__(3)
        self.calls: list[tuple[Any, ...]] = []
        self.sleeping = False

    def timed(self, *about: Any) -> None:
        self.calls.append(("timed", *about))

    def spent(self, *about: Any) -> None:
        self.calls.append(("spent", *about))

    def looked(self, *about: Any) -> None: ...

    @property
    def sleeps(self) -> bool:
        return self.sleeping


class Followed(Drafter):
    """Proposes the token behind the last one, and keeps the tokens of each row."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}

    def enter(self, row: int, tokens: Any, scope: bytes) -> None:
        self.rows[row] = list(tokens)

    def leave(self, row: int) -> None:
        del self.rows[row]

    def extend(self, row: int, tokens: Any) -> None:
        self.rows[row] += tokens

    def propose(self, row: int, limit: int) -> list[int]:
        return [self.rows[row][-1] + 1] * min(limit, 1)


class Steps:
    """A worker of which only the rows and the hook are real. Each step takes a second, and the engine's part a tenth."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.length, self.drafter = clock, RecordedLength(), Followed()
        self.rows = RequestRows(4, 256, 1, 8)
        self.hook = SpeculationHook(
            self.rows, self.drafter, self.length, lambda rows: 3, waits=True
        )
        self.hook._cold = self.number = 0

    def enter(self, row: int, tokens: list[int]) -> None:
        new = EnteredRow(row, str(row), tokens, len(tokens), 0, [], SamplingParams())
        self.rows.enter(new)
        self.rows.accepts_drafts[row] = True
        self.hook.enter(new)

    def leave(self, row: int) -> None:
        self.rows.leave(row)
        self.hook.leave(row)

    def step(self, *drawn: tuple[int, list[int]]) -> None:
        """Rows draw these tokens, of which all but one were draft tokens."""
        rows, self.clock.now = self.rows, self.clock.now + 0.1
        work = [
            WorkItem(row, int(rows.length[row] - rows.num_computed_tokens[row]), [], 0, True)
            for row, _ in drawn
        ]
        self.number += 1
        plan, acts = StepPlan(self.number, [], work, []), self.number >= self.hook.idle_until
        if acts:
            self.hook.before(plan, None)
        self.clock.now += 1.0
        for row, tokens in drawn:
            start = int(rows.length[row] - rows.num_drafts[row])
            rows.write_tokens(row, start, tokens)
            rows.length[row], rows.num_drafts[row] = start + len(tokens), 0
            rows.num_computed_tokens[row] = rows.length[row] - 1
        if acts:
            self.hook.after(plan)
            self.hook.report()

    def said(self, what: str) -> list[tuple[Any, ...]]:
        found = [call[1:] for call in self.length.calls if call[0] == what]
        self.length.calls = [call for call in self.length.calls if call[0] != what]
        return [tuple(round(each, 6) for each in call) for call in found]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return Steps(clock)


def test_a_steps_time_has_the_engines_part_and_its_tokens_those_of_prompts(steps: Steps) -> None:
    steps.enter(0, [1, 2, 3])
    steps.step((0, [4]))
    assert steps.said("timed") == []  # when the engine began is not known
    steps.enter(1, [7] * 5)
    steps.step((0, [5, 6]), (1, [7]))  # one draft token, and a prompt
    assert steps.said("timed") == [(2, 7, 1.1)]
    steps.step((0, [7]))
    assert steps.said("timed") == [(1, 2, 1.1)]


def test_time_without_requests_does_not_count(steps: Steps) -> None:
    steps.enter(0, [1])
    for _ in range(3):
        steps.step((0, [9]))
    steps.said("spent"), steps.said("timed")
    steps.clock.now += 50.0
    steps.step((0, [9]))
    assert steps.said("spent") == [(1, 1, 1.0, 2.0)]  # a step, and as long again at most
    assert steps.said("timed") == [(1, 2, 2.0)]


def test_tokens_are_drawn_ones_and_half_of_the_last_draft_tokens(steps: Steps) -> None:
    steps.enter(0, [1])
    steps.enter(1, [1])
    steps.step((0, [9]), (1, [9]))
    steps.step((0, [9, 9, 9]), (1, [9]))
    assert [call[2] for call in steps.said("spent")] == [2.0, 4.0]
    steps.leave(0)  # behind two draft tokens: its answer may have ended at either
    steps.step((1, [9]))
    assert [call[2] for call in steps.said("spent")] == [0.0]


def test_the_fastest_step_of_a_rest_counts(steps: Steps) -> None:
    steps.enter(0, [1])
    steps.step((0, [9]))
    steps.step((0, [9]))
    steps.said("timed"), steps.said("spent")
    steps.hook._drafted.clear()  # as if none were proposed
    steps.rows.num_drafts[0], steps.rows.length[0] = 0, steps.rows.length[0] - 1
    steps.length.rest = 3
    for slower in (0.5, 0.0, 0.2):
        steps.clock.now += slower
        steps.step((0, [9]))
    assert steps.said("timed") == []
    steps.step((0, [9]))
    assert steps.said("timed") == [(1, 1, 1.1)]
    assert steps.said("spent") == [(1, 4, 4.0, 5.1)]


def test_the_first_steps_of_a_process_say_nothing(steps: Steps) -> None:
    steps.hook._cold = COLD_STEPS
    steps.enter(0, [1])
    for _ in range(COLD_STEPS):
        steps.step((0, [9]))
    assert steps.length.calls == []
    steps.step((0, [9]))
    assert [call[0] for call in steps.length.calls] == ["timed", "spent"]


def test_a_drafter_that_sleeps_knows_no_request_and_then_all_with_their_tokens(
    steps: Steps,
) -> None:
    steps.enter(0, [1])
    steps.enter(1, [2])
    steps.step((0, [9]), (1, [8]))
    steps.step((0, [9]), (1, [8]))
    assert steps.drafter.rows == {0: [1, 9, 9], 1: [2, 8, 8]}
    steps.length.sleeping = True
    steps.step((0, [9]), (1, [8]))  # the drafter looks once more: rows had draft tokens
    assert steps.rows.num_drafts[:2].tolist() == [1, 1]
    steps.length.most = 0
    steps.step((0, [9]), (1, [8]))
    steps.step((0, [9]), (1, [8]))
    assert (steps.drafter.rows, steps.hook.idle_until) == ({}, steps.number + IDLE_STEPS)
    steps.said("spent")
    steps.leave(0)
    steps.enter(2, [3])
    for _ in range(IDLE_STEPS):
        steps.step((1, [8]), (2, [7]))
    assert steps.said("spent") == [(2, IDLE_STEPS, 2.0, 0.0)]  # how long they took is not known
    steps.hook.processors = [SimpleNamespace(looks_ahead=True)]
    steps.enter(3, [4])  # its forced tokens would be draft tokens
    assert steps.hook.idle_until == 0
    steps.leave(3)
    steps.hook.processors, steps.hook.idle_until = [], steps.number + IDLE_STEPS
    steps.length.sleeping = False
    for _ in range(IDLE_STEPS):
        assert steps.drafter.rows == {}
        steps.step((1, [8]), (2, [7]))
    assert steps.drafter.rows == {
        1: [2] + [8] * (5 + 2 * IDLE_STEPS),
        2: [3] + [7] * 2 * IDLE_STEPS,
    }
    steps.leave(1)
    assert steps.drafter.rows.keys() == {2}
