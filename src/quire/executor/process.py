"""ProcessExecutor: the worker runs in a process of its own.

Knows one socket and one child process. Does not know what a plan means. The child is a new program, not a fork:
a user's script needs no `__main__` guard, and nothing of this process is copied. No torch here.

Only one thread may use it at a time, as EngineCore does. A wait ends when the child ends: its socket closes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from quire.config.serialize import import_path
from quire.errors import ConfigError, EngineDeadError, RankLost, StartupError, StepFailed
from quire.executor.base import StepFuture
from quire.executor.messages import (
    Answer,
    CallFailed,
    CallResult,
    CallWorker,
    StartWorker,
    Up,
    WorkerEnded,
    WorkerProgress,
    WorkerStarted,
    decode_up,
    encode,
    exception,
)
from quire.processes.child import StopCounter, how_it_ended, start_child, wait_or_kill
from quire.protocol.plan import StepPlan, StepResult
from quire.startup_timer import Report, no_report

LOOK_AGAIN_S = 1.0  # how often a wait looks whether the child runs: the socket may not close
END_S = 5.0  # how long a child may take to end after its socket is closed


class FarProcess(Protocol):
    """A process on another machine, as far as this one can see and end it."""

    def poll(self) -> int | None:
        """None: it runs."""

    def kill(self) -> None: ...

    def how_it_ended(self) -> str: ...


Start = Callable[[], tuple[Connection, "subprocess.Popen[bytes] | FarProcess"]]


class ProcessExecutor:
    """An Executor for one child process.

    Args:
        target: "module:function"; the child calls it with `payload` and a `Report` to create the worker.
        report: receives the child's reports.
        start: starts the child, or finds it on another machine; returns this end of its connection, and the process.
        wait: until the worker is created; else `wait_started` must be called next.

    Raises:
        ConfigError, NotEnoughMemory, ...: the child found an error in the configuration.
        StartupError: the child could not create the worker for another reason; `detail` has its traceback.
    """

    recoverable: tuple[type[BaseException], ...] = (StepFailed,)

    def __init__(
        self,
        target: str,
        payload: bytes,
        report: Report = no_report,
        *,
        start: Start | None = None,
        wait: bool = True,
    ):
        self._pipe, process = (start or spawn)()
        self.process = process
        self._stops = StopCounter(process.pid) if isinstance(process, subprocess.Popen) else None
        self._num_sent = self._num_answered = 0
        self._answers: dict[int, Answer] = {}  # those that nothing has fetched
        self._dead: Exception | None = None
        try:
            self._send(encode(StartWorker(target, payload, import_path())))
            if wait:
                self.wait_started(report)
        except BaseException:
            self.close()
            raise

    def wait_started(self, report: Report, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until the worker is created. `on_wait` is called now and then; its exceptions end the wait.

        Raises as the constructor.
        """
        message: Up | None = None
        while not isinstance(message, WorkerStarted):
            if (message := self._receive(LOOK_AGAIN_S)) is None:
                on_wait()
            elif isinstance(message, WorkerProgress):
                report(message.stage, message.share)

    # -- interface for the engine ---------------------------------------------------------------
    def launch(self, plan: StepPlan) -> StepFuture:
        return _Step(self, self.request(encode(plan)))

    def call(self, name: str, *args: Any) -> list[Any]:
        """Like `Executor.call`. Functions and classes among the arguments are sent by name.

        Raises:
            the function's own exception, with the child's traceback as a note; QuireError if its type is
            neither Quire's nor Python's.
            ConfigError, TypeError: an argument, or the result, cannot go to another process.
            EngineDeadError: the child has died.
        """
        answer = self.answer(self.request(encode(CallWorker(name, list(args)))))
        if isinstance(answer, CallFailed):
            raise exception(answer)
        return [answer.value] if isinstance(answer, CallResult) else []

    def lost(self) -> str:
        ended = self.process.poll() is not None
        return f"the worker's process {self._how_it_ended()}" if ended else ""

    def close(self) -> None:
        """Close the socket, which ends the child; kill the child if it does not end."""
        if self._dead is None:
            self._dead = EngineDeadError("the worker was shut down")
        self._pipe.close()
        self.wait_or_kill()

    def wait_or_kill(self) -> None:
        """Kill the child if it does not end by itself soon."""
        if isinstance(self.process, subprocess.Popen):
            wait_or_kill(self.process, END_S)
        else:
            self.process.kill()

    # -- messages -------------------------------------------------------------------------------
    def request(self, message: bytes) -> int:
        """Send an encoded message and return the number of its answer."""
        self._send(message)
        self._num_sent += 1
        return self._num_sent

    def answer(self, number: int) -> Answer:
        """Wait for answer `number`. Each answer can be fetched once."""
        while self.look(number, LOOK_AGAIN_S) is None:
            pass
        return self._answers.pop(number)

    def look(self, number: int, seconds: float = 0.0) -> Answer | None:
        """Answer `number`, if it comes within that time. It can still be fetched."""
        while number not in self._answers:
            if (message := self._receive(seconds)) is None:
                return None
            if isinstance(message, WorkerProgress | WorkerStarted):
                raise RuntimeError(f"{type(message).__name__} is unexpected")
            self._num_answered += 1
            self._answers[self._num_answered] = message
        return self._answers[number]

    def cause_of_end(self) -> Exception | None:
        """Why the child has ended; None: it runs. It does not wait."""
        if self._dead is None and self.process.poll() is not None:
            self._ended(self._last_message())
        return self._dead

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the child, if it is on this machine (`StopCounter.look`)."""
        return self._stops is not None and self._stops.look()

    def _send(self, data: bytes) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            self._pipe.send_bytes(data)
        except OSError:
            raise self._ended(self._last_message()) from None

    def _receive(self, seconds: float) -> Answer | WorkerProgress | WorkerStarted | None:
        """The next message, if it comes within that time. Raises the cause if the child has ended."""
        if self._dead is not None:
            raise self._dead
        message: Up | None = None
        with contextlib.suppress(EOFError, OSError):
            ready = self._pipe.poll(seconds)
            if not ready:
                if self.process.poll() is None:
                    return None
                ready = self._pipe.poll(0)  # it may have sent its answer before it ended
            if ready:
                message = decode_up(self._pipe.recv_bytes())
        if message is None or isinstance(message, WorkerEnded):
            raise self._ended(message or self._last_message())
        return message

    def _last_message(self) -> WorkerEnded | None:
        """What the child sent at its end. Answers before it are dropped."""
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll(0):
                message = decode_up(self._pipe.recv_bytes())
                if isinstance(message, WorkerEnded):
                    return message
        return None

    def _ended(self, last: WorkerEnded | None) -> Exception:
        """The child has ended, or ends: the cause, which every later use raises."""
        self._dead = self._cause(last)
        return self._dead

    def _how_it_ended(self) -> str:
        if isinstance(self.process, subprocess.Popen):
            return how_it_ended(self.process, END_S)
        return self.process.how_it_ended()

    def _cause(self, last: WorkerEnded | None) -> Exception:
        starting = not self._num_sent
        if last is None:
            text = f"the worker's process {self._how_it_ended()}"
            return StartupError(text) if starting else EngineDeadError(text)
        error = exception(last)
        if isinstance(error, RankLost) or (starting and isinstance(error, ConfigError)):
            return error
        text = f"the worker's process failed: {last.kind}: {last.text}"
        if starting:
            return StartupError(text, last.detail)
        dead = EngineDeadError(text)
        dead.add_note(f"In the worker's process:\n{last.detail}")
        return dead


class _Step:
    """The future of a step in the child."""

    def __init__(self, executor: ProcessExecutor, number: int):
        self._executor, self._number = executor, number
        self._answer: Answer | None = None

    def result(self) -> StepResult:
        if self._answer is None:
            self._answer = self._executor.answer(self._number)
        if isinstance(self._answer, CallFailed):
            raise exception(self._answer)
        if not isinstance(self._answer, StepResult):
            raise RuntimeError(f"{type(self._answer).__name__} came for a step")
        return self._answer


def spawn(fds: Sequence[int] = ()) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a child on this machine. It inherits the descriptors `fds`."""
    parent_end, child_end = Pipe()
    fd = child_end.fileno()
    lasting = int(threading.current_thread() is threading.main_thread())
    try:
        child = start_child(
            "quire.executor.worker_process", [fd, os.getpid(), lasting], fds=[fd, *fds]
        )
    except BaseException:
        parent_end.close()
        raise
    finally:
        child_end.close()  # or this process would never see the child's end close
    return parent_end, child
