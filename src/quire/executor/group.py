"""GroupExecutor: a worker for each rank, in a process of its own; every rank gets every plan, and one answers.

Knows the processes of all ranks. Does not know what the ranks exchange. The ranks are one unit: if one ends, is stopped, or
fails a step that others do not fail, what these wait for never comes. So all are killed, and the supervisor starts a new engine.
If all fail a step for the same reason, they have the same state, and only its requests end. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import EngineDeadError, StepFailed
from quire.executor.base import StepFuture
from quire.executor.messages import CallFailed, CallResult, CallWorker, encode, exception
from quire.executor.process import ProcessExecutor, Start
from quire.protocol.plan import StepPlan, StepResult
from quire.startup_timer import Report, no_report

STOPPED = 15
"""Looks at a rank, a second each, that find it stopped: then it is lost. A rank that waits for it in an exchange says so earlier."""
FAILED = 2
"""Looks that find a step failed in some ranks only: the others have had their time to fail, too."""


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

    recoverable: tuple[type[BaseException], ...] = (StepFailed,)
    _step: Sequence[int] = ()  # the numbers of its answers, while they are read
    _failed = 0  # looks that found it failed in some ranks

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
        self._stopped = [0] * len(payloads)  # how often each was found so, one after the other
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

    def results(self, numbers: Sequence[int]) -> list[StepResult]:
        """Of a step, by rank.

        Raises:
            StepFailed: all ranks failed it, for the same reason.
            EngineDeadError: one failed it, or has died, or is stopped; all were killed.
        """
        self._step, self._failed = numbers, 0
        try:
            answers = self.answers(numbers)
        finally:
            self._step = ()
        failures = [each for each in answers if isinstance(each, CallFailed)]
        reasons = {(each.kind, each.text) for each in failures}
        if len(failures) == len(answers) and len(reasons) == 1:
            raise exception(failures[0])
        for rank, answer in enumerate(answers):
            if isinstance(answer, CallFailed):
                raise self.fail(_failure(rank, answer))
        return [answer for answer in answers if isinstance(answer, StepResult)]

    def _check(self) -> None:
        """Raises the cause if a rank has ended or is stopped, another has lost it, or has failed the step: the one that is waited
        for may never answer."""
        for rank, member in enumerate(self.members):
            if member.process.poll() is not None:
                member.fail()
            for answer in member.ready() if rank != self._awaited else ():
                _unless_lost(answer)
        for rank, member in enumerate(self.members):
            self._stopped[rank] = self._stopped[rank] + 1 if member.is_stopped() else 0
            if self._stopped[rank] >= STOPPED:
                raise EngineDeadError(f"rank {rank} was stopped (SIGSTOP, or a debugger)")
        for rank, number in enumerate(self._step):
            found = None if rank == self._awaited else self.members[rank].look(number)
            if isinstance(found, CallFailed):
                self._failed += 1
                if self._failed >= FAILED:
                    raise _failure(rank, found)
                return

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
        """The result of the first answering rank. Raises as `GroupExecutor.results`, and EngineDeadError: a rank drew other
        tokens."""
        if self._result is None:
            results = self._group.results(self._numbers)
            self._result = self._agreed({rank: results[rank] for rank in self._group.answering})
        return self._result

    def _agreed(self, results: Mapping[int, StepResult]) -> StepResult:
        """A request that fails in one rank fails: limits of time, as of grammars, may hit one rank alone."""
        first = min(results)
        found = results[first]
        for other in results.values():
            found.errors = other.errors | found.errors
            found.kinds = other.kinds | found.kinds
        for rank, other in results.items():
            pairs = zip(found.tokens, other.tokens, strict=True)
            if any(one != two and at not in found.errors for at, (one, two) in enumerate(pairs)):
                why = f"rank {rank} drew other tokens than rank {first} in step {other.step}"
                raise self._group.fail(EngineDeadError(why))
        return found


def _failure(rank: int, answer: CallFailed) -> EngineDeadError:
    error = EngineDeadError(f"rank {rank} failed a step: {answer.kind}: {answer.text}")
    error.add_note(f"In the process of rank {rank}:\n{answer.detail}")
    return error
