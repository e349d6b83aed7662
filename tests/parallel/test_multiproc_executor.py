"""What a group of workers makes of the answers of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import EngineDeadError, RankLost, StepFailed
from quire.executor.messages import CallFailed, call_failed
from quire.executor.multiproc_executor import FAILED, MultiprocExecutor
from quire.processes.child import STOPPED_LOOKS, StopCounter
from quire.protocol.plan import StepPlan, StepResult


class Member:
    """A rank with a real process, which gives this answer; None: it never comes, and the group looks around."""

    def __init__(self, answer: Any, looks: list[int]):
        self.given, self.looks = answer, looks
        self.process = subprocess.Popen(["sleep", "100"])
        self.stops = StopCounter(self.process.pid)
        self.end: Exception | None = None

    def is_stopped(self) -> bool:
        return self.stops.look()

    def cause_of_end(self) -> Exception | None:
        return self.end

    def wait_or_kill(self) -> None:
        self.process.wait(20)

    def request(self, message: bytes) -> int:
        return 0

    def look(self, number: int, seconds: float = 0.0) -> Any:
        if seconds and self.given is None:
            self.looks.append(0)
            assert len(self.looks) < 100
        return self.given

    def answer(self, number: int) -> Any:
        return self.given


class Group(MultiprocExecutor):
    def __init__(self, answers: list[Any]):
        self.looks: list[int] = []
        self.members: list[Any] = [Member(each, self.looks) for each in answers]
        self.answering, self._on_end = [0, 1], lambda stopped: None

    def alive(self) -> list[bool]:
        return [member.process.poll() is None for member in self.members]


@pytest.fixture
def made() -> Iterator[list[Group]]:
    groups: list[Group] = []
    yield groups
    for group in groups:
        group._kill()


def run(made: list[Group], *answers: Any) -> StepResult:
    made.append(Group(list(answers)))
    return made[0].launch(StepPlan(7, [], [], [])).result()


def failed(text: str) -> CallFailed:
    return call_failed(StepFailed(text))


def test_a_step_that_all_fail_alike_ends_only_its_requests(made: list[Group]) -> None:
    with pytest.raises(StepFailed, match="a wrong processor"):
        run(made, failed("a wrong processor"), failed("a wrong processor"))
    assert made[0].alive() == [True, True]


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("other", [None, failed("another"), StepResult(7, [[1]])])
def test_a_step_that_one_fails_ends_all(made: list[Group], other: Any, faulty: int) -> None:
    answers = [other, other]
    answers[faulty] = failed("a fault")
    with pytest.raises(
        EngineDeadError, match=rf"rank {faulty} failed a step: .*a fault|rank 0 .*another"
    ):
        run(made, *answers)
    assert made[0].alive() == [False, False]
    assert len(made[0].looks) == (FAILED if other is None else 0)
    with pytest.raises(EngineDeadError):
        made[0].call("ping")


def test_a_stopped_rank_ends_all(made: list[Group]) -> None:
    made.append(Group([None, None]))
    process = made[0].members[1].process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
    with pytest.raises(EngineDeadError, match="rank 1 was stopped"):
        made[0].launch(StepPlan(7, [], [], [])).result()
    assert made[0].alive() == [False, False]
    assert len(made[0].looks) >= STOPPED_LOOKS


def test_the_end_of_a_rank_tells_more_than_that_it_was_missed(made: list[Group]) -> None:
    made.append(Group([None, None]))
    first, second = made[0].members
    first.end = RankLost("rank 0 of 2 waited for rank 1, which has ended")
    with pytest.raises(EngineDeadError, match="waited for rank 1"):
        made[0]._check()
    ended = EngineDeadError("the worker's process was ended by SIGKILL")
    found = iter([None, None])
    second.cause_of_end = lambda: next(found, ended)  # it shows a moment later
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        made[0].call("ping")
    assert made[0].alive() == [False, False]


def test_a_request_that_fails_in_one_rank_fails(made: list[Group]) -> None:
    late = StepResult(7, [[1], [9]], errors={1: "too slow"}, kinds={1: "invalid"})
    found = run(made, StepResult(7, [[1], [5]]), late)
    assert (found.tokens, found.errors, found.kinds) == (
        [[1], [5]],
        {1: "too slow"},
        {1: "invalid"},
    )


def test_ranks_that_draw_other_tokens_end(made: list[Group]) -> None:
    with pytest.raises(EngineDeadError, match="rank 1 drew other tokens than rank 0 in step 7"):
        run(made, StepResult(7, [[1], [5]]), StepResult(7, [[1], [6]]))
    assert made[0].alive() == [False, False]
