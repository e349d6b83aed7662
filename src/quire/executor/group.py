"""GroupExecutor: a worker for each rank, in a process of its own; every rank gets every plan, and one answers.

Knows the processes of all ranks. Does not know what the ranks exchange. The ranks are one unit: if one ends, or fails a
step, what the others wait for never comes. So all are killed, and the supervisor starts a new engine. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import EngineDeadError
from quire.executor.base import StepFuture
from quire.executor.messages import CallFailed, CallResult, CallWorker, encode, exception
from quire.executor.process import ProcessExecutor, Start
from quire.protocol.plan import StepPlan, StepResult
from quire.startup_timer import Report, no_report


class GroupExecutor:
    """An Executor for one process a rank.

    Args:
        target: see `ProcessExecutor`.
        payloads: of each rank.
        starts: how the process of each rank starts (`ProcessExecutor`).
        answering: the ranks that draw tokens; the first of them answers.
        report: receives the reports of rank 0.
        on_end: called when the ranks have ended; True: this executor was stopped, False: a rank failed.

    Raises:
        as `ProcessExecutor`, if any rank does not start; the others are killed.
    """

    recoverable: tuple[type[BaseException], ...] = ()

    def __init__(
        self,
        target: str,
        payloads: Sequence[bytes],
        starts: Sequence[Start],
        report: Report = no_report,
        answering: Sequence[int] = (0,),
        on_end: Callable[[bool], None] = lambda stopped: None,
    ):
        self.members: list[ProcessExecutor] = []
        self.answering, self._on_end = list(answering), on_end
        self._dead: Exception | None = None
        self._awaited = 0  # the rank whose answer is read now
        try:
            for payload, start in zip(payloads, starts, strict=True):
                own = ProcessExecutor(target, payload, start=start, on_wait=self._check, wait=False)
                self.members.append(own)
            for rank, member in enumerate(self.members):
                member.wait_started(report if rank == 0 else no_report)
        except BaseException:
            self._kill()
            raise

    def launch(self, plan: StepPlan) -> StepFuture:
        return _GroupStep(self, self._send(encode(plan)))

    def call(self, name: str, *args: Any) -> list[Any]:
        """One result for each rank. Raises as `ProcessExecutor.call`; the first failure counts."""
        answers = self.answers(self._send(encode(CallWorker(name, list(args)))))
        for answer in answers:
            if isinstance(answer, CallFailed):
                raise exception(answer)
        return [answer.value for answer in answers if isinstance(answer, CallResult)]

    def close(self) -> None:
        for member in self.members:
            member.close()
        self._on_end(True)

    def answers(self, numbers: Sequence[int]) -> list[StepResult | CallResult | CallFailed]:
        """The answers of all ranks. Raises EngineDeadError: a rank has died, so all were killed."""
        return [self.answer(rank, at) for rank, at in enumerate(numbers)]

    def answer(self, rank: int, number: int) -> StepResult | CallResult | CallFailed:
        """The answer of one rank. Raises as `answers`."""
        self._awaited = rank
        try:
            return _unless_lost(self.members[rank].answer(number))
        except Exception as error:
            raise self.fail(error) from None

    def fail(self, error: Exception) -> Exception:
        """Kill all ranks. Returns what every later use raises: this error, or the death of a rank that caused it."""
        try:
            self._check()
        except Exception as cause:
            error = cause
        self._kill()
        self._dead = error
        return error

    def _send(self, message: bytes) -> list[int]:
        if self._dead is not None:
            raise self._dead
        try:
            return [member.request(message) for member in self.members]
        except Exception as error:
            raise self.fail(error) from None

    def _check(self) -> None:
        """Raises the cause if a rank has ended, or another has lost it: the one that is waited for may never answer."""
        for rank, member in enumerate(self.members):
            if member.process.poll() is not None:
                member.fail()
            for answer in member.ready() if rank != self._awaited else ():
                _unless_lost(answer)

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.wait_or_kill()
        self._on_end(False)


def _unless_lost(
    answer: StepResult | CallResult | CallFailed,
) -> StepResult | CallResult | CallFailed:
    """Raises EngineDeadError: another rank did not come to an exchange, and the group cannot go on."""
    if isinstance(answer, CallFailed) and "RankLost" in (answer.kind, answer.text.split(":")[0]):
        raise EngineDeadError(answer.text.removeprefix("RankLost: "))
    return answer


class _GroupStep:
    """The future of a step of all ranks."""

    def __init__(self, group: GroupExecutor, numbers: list[int]):
        self._group, self._numbers = group, numbers
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """The result of the first answering rank. Raises EngineDeadError: a rank failed, or drew other tokens."""
        if self._result is None:
            results = [self._own(rank, at) for rank, at in enumerate(self._numbers)]
            self._result = self._agreed({rank: results[rank] for rank in self._group.answering})
        return self._result

    def _own(self, rank: int, number: int) -> StepResult:
        """A rank's result. What other ranks wait for does not come if one has failed: then all are killed at once."""
        answer = self._group.answer(rank, number)
        if isinstance(answer, StepResult):
            return answer
        error = EngineDeadError(f"rank {rank} failed a step")
        if isinstance(answer, CallFailed):
            error = EngineDeadError(f"rank {rank} failed a step: {answer.kind}: {answer.text}")
            error.add_note(f"In the process of rank {rank}:\n{answer.detail}")
        raise self._group.fail(error)

    def _agreed(self, results: Mapping[int, StepResult]) -> StepResult:
        first = min(results)
        for rank, other in results.items():
            if other.tokens != results[first].tokens:
                why = f"rank {rank} drew other tokens than rank {first} in step {other.step}"
                raise self._group.fail(EngineDeadError(why))
        return results[first]
