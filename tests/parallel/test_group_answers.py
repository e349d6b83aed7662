"""What a group of workers makes of the answers of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import EngineDeadError, StepFailed
from quire.executor.group import FAILED, STOPPED, GroupExecutor
from quire.executor.messages import CallFailed, call_failed
from quire.processes.child import is_stopped
from quire.protocol.plan import StepPlan, StepResult


class Member:
    """A rank with a real process, which gives this answer; None: it never comes, and the group looks around."""

    def __init__(self, answer: Any, looks: list[int]):
        self.given, self.looks = answer, looks
        self.check = lambda: None
        self.process = subprocess.Popen(["sleep", "100"])

    def is_stopped(self) -> bool:
        return is_stopped(self.process.pid)

    def wait_or_kill(self) -> None:
        self.process.wait(20)

    def request(self, message: bytes) -> int:
        return 0

    def look(self, number: int) -> Any:
        return self.given

    def ready(self) -> list[Any]:
        return [] if self.given is None else [self.given]

    def answer(self, number: int) -> Any:
        while self.given is None:
            self.looks.append(0)
            assert len(self.looks) < 100
            self.check()
        return self.given


class Group(GroupExecutor):
    def __init__(self, answers: list[Any]):
        self.looks: list[int] = []
        self.members: list[Any] = [Member(each, self.looks) for each in answers]
        self.answering, self._dead = [0, 1], None
        self._stopped, self._on_end = [0] * len(answers), lambda stopped: None
        self._awaited = 0
        for member in self.members:
            member.check = self._check

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


@pytest.mark.parametrize("other", [None, failed("another"), StepResult(7, [[1]])])
def test_a_step_that_one_fails_ends_all(made: list[Group], other: Any) -> None:
    with pytest.raises(
        EngineDeadError, match=r"rank 1 failed a step|rank 0 failed a step: .*another"
    ):
        run(made, other, failed("a fault"))
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
    assert len(made[0].looks) >= STOPPED


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
