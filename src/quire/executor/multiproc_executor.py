"""MultiprocExecutor: a worker for each rank, in a process of its own; every rank gets every plan, and one answers.

Knows the processes of all ranks. Does not know what the ranks exchange. The ranks are one unit: if one ends, is stopped, or
fails a step that others do not fail, what these wait for never comes. So all are killed, and the supervisor starts a new engine.
If all fail a step for the same reason, they have the same state, and only its requests end. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import EngineDeadError, RankLost, StartupError, StepFailed
from quire.executor.base import StepFuture
from quire.executor.messages import Answer, CallFailed, CallResult, CallWorker, encode, exception
from quire.executor.rank_process import LOOK_AGAIN_S, RankProcess, Start
from quire.protocol.plan import StepPlan, StepResult
from quire.startup_timer import Report, no_report

FAILED = 2
"""Looks, LOOK_AGAIN_S each, that find a step failed in some ranks only: the others have had their time to fail, too."""

CAUSE_LOOKS, CAUSE_LOOK_S = 10, 0.1
"""How long the end of a rank may take to show after another lost it."""


class MultiprocExecutor:
    """An Executor for one process a rank.

    Args:
        target: see `RankProcess`.
        payloads: of each rank.
        starts: how the process of each rank starts (`RankProcess`).
        answering: the ranks that draw tokens; the first of them answers.
        report: receives the reports of rank 0.
        on_end: called when the ranks have ended; True: this executor was stopped, False: a rank failed.

    Raises:
        as `RankProcess.wait_started`, if any rank does not start; the others are killed.
    """

    recoverable: tuple[type[BaseException], ...] = (StepFailed,)
    _dead: Exception | None = None
    _failed = 0  # looks that found the awaited step failed in some ranks

    def __init__(
        self,
        target: str,
        payloads: Sequence[bytes],
        starts: Sequence[Start],
        report: Report = no_report,
        answering: Sequence[int] = (0,),
        on_end: Callable[[bool], None] = lambda stopped: None,
    ):
        self.members: list[RankProcess] = []
        self.answering, self._on_end = list(answering), on_end
        try:
            for payload, start in zip(payloads, starts, strict=True):
                own_report = no_report if self.members else report
                self.members.append(RankProcess(target, payload, start, own_report))
            for member in self.members:
                member.wait_started(self._check)
        except Exception as error:
            cause = self.fail(error)
            if isinstance(cause, EngineDeadError):  # of a rank that had started, or lost another
                cause = StartupError(str(cause))
            raise cause from None
        except BaseException:
            self._kill()
            raise

    def launch(self, plan: StepPlan) -> StepFuture:
        return _MultiprocStep(self, self._send(encode(plan)))

    def call(self, name: str, *args: Any) -> list[Any]:
        """One result for each rank. Functions and classes among the arguments are sent by name.

        Raises:
            the first failure: the function's own exception, with the traceback of its process as a note; InternalError if
            its type is neither Quire's nor Python's.
            ConfigError, TypeError: an argument, or a result, cannot go to another process.
            EngineDeadError: a rank has ended, or is stopped; all were killed.
        """
        answers = self._answers(self._send(encode(CallWorker(name, list(args)))))
        for answer in answers:
            if isinstance(answer, CallFailed):
                raise exception(answer)
        return [answer.value for answer in answers if isinstance(answer, CallResult)]

    def lost(self) -> str:
        found = ((rank, member.lost()) for rank, member in enumerate(self.members))
        return next((f"rank {rank}: {why}" for rank, why in found if why), "")

    def close(self) -> None:
        is_whole = self._dead is None and not self.lost()
        for member in self.members:
            member.close()
        self._on_end(is_whole)

    def results(self, numbers: Sequence[int]) -> list[StepResult]:
        """Of a step, by rank.

        Raises:
            StepFailed: all ranks failed it, for the same reason.
            EngineDeadError: one failed it, or has died, or is stopped; all were killed.
        """
        self._failed = 0
        answers = self._answers(numbers, step=numbers)
        failures = [each for each in answers if isinstance(each, CallFailed)]
        reasons = {(each.kind, each.text) for each in failures}
        if len(failures) == len(answers) and len(reasons) == 1:
            raise exception(failures[0])
        for rank, answer in enumerate(answers):
            if isinstance(answer, CallFailed):
                raise self.fail(_failure(rank, answer))
        return [answer for answer in answers if isinstance(answer, StepResult)]

    def fail(self, error: Exception) -> Exception:
        """Kill all ranks, once. Returns what every later use raises: this error, or the end of a rank that caused it."""
        if self._dead is None:
            error = self._cause(error)
            self._kill()
            self._dead = error
        return self._dead

    def _cause(self, error: Exception) -> Exception:
        """The end of a rank that caused this error. Another rank may report first that it lost it."""
        for _ in range(CAUSE_LOOKS):
            try:
                self._check()
            except Exception as cause:
                error = cause
            if not isinstance(error, RankLost):
                break
            time.sleep(CAUSE_LOOK_S)
        return error

    def _send(self, message: bytes) -> list[int]:
        if self._dead is not None:
            raise self._dead
        try:
            return [member.request(message) for member in self.members]
        except Exception as error:
            raise self.fail(error) from None

    def _answers(self, numbers: Sequence[int], step: Sequence[int] = ()) -> list[Answer]:
        """The answers of all ranks. `step`: the same numbers, if they answer a step.

        Raises:
            EngineDeadError: a rank has ended, or is stopped, or failed the step alone; all were killed.
        """
        try:
            for member, number in zip(self.members, numbers, strict=True):
                while member.look(number, LOOK_AGAIN_S) is None:
                    self._check(step)
            pairs = zip(self.members, numbers, strict=True)
            return [member.answer(number) for member, number in pairs]
        except Exception as error:
            raise self.fail(error) from None

    def _check(self, step: Sequence[int] = ()) -> None:
        """Raises why an answer may never come: a rank has ended, or is stopped, or some have failed this step.

        A rank that ends because it lost another tells less than the end of that one.
        """
        causes = [why for member in self.members if (why := member.cause_of_end()) is not None]
        if causes:
            raise next((why for why in causes if not isinstance(why, RankLost)), causes[0])
        for rank, member in enumerate(self.members):
            if member.is_stopped():
                raise EngineDeadError(f"rank {rank} was stopped (SIGSTOP, or a debugger)")
        answers = [member.look(number) for member, number in zip(self.members, step, strict=False)]
        failed = [(rank, each) for rank, each in enumerate(answers) if isinstance(each, CallFailed)]
        self._failed = self._failed + 1 if failed else 0
        if self._failed >= FAILED:
            raise _failure(*failed[0])

    def _kill(self) -> None:
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.wait_or_kill()
        self._on_end(False)


class _MultiprocStep:
    """The future of a step of all ranks."""

    def __init__(self, group: MultiprocExecutor, numbers: list[int]):
        self._group, self._numbers = group, numbers
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """The result of the first answering rank. Raises as `MultiprocExecutor.results`, and EngineDeadError: a rank drew other
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
            if any(
                one != two and index not in found.errors for index, (one, two) in enumerate(pairs)
            ):
                why = f"rank {rank} drew other tokens than rank {first} in step {other.step}"
                raise self._group.fail(EngineDeadError(why))
        return found


def _failure(rank: int, answer: CallFailed) -> EngineDeadError:
    error = EngineDeadError(f"rank {rank} failed a step: {answer.kind}: {answer.text}")
    error.add_note(f"In the process of rank {rank}:\n{answer.detail}")
    return error
