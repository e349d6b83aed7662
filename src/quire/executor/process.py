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
from quire.errors import ConfigError, EngineDeadError, StartupError, StepFailed
from quire.executor.base import StepFuture
from quire.executor.messages import (
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
from quire.processes.child import how_it_ended, is_stopped, start_child, wait_or_kill
from quire.protocol.plan import StepPlan, StepResult
from quire.startup_timer import Report, no_report

# how often a wait checks that the child is alive, in case the socket does not close
LOOK_AGAIN_S = 1.0
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
        on_wait: called now and then while it waits for the child; its exceptions end the wait.
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
        on_wait: Callable[[], None] = lambda: None,
        wait: bool = True,
    ):
        self._pipe, self.process = (start or spawn)()
        self._on_wait = on_wait
        self._num_sent = self._num_answered = 0
        # answers not requested yet
        self._answers: dict[int, StepResult | CallResult | CallFailed] = {}
        self._dead: Exception | None = None
        try:
            self._send(encode(StartWorker(target, payload, import_path())))
            if wait:
                self.wait_started(report)
        except BaseException:
            self.close()
            raise

    def wait_started(self, report: Report) -> None:
        """Wait until the worker is created. Raises as the constructor."""
        while isinstance(message := self._receive(), WorkerProgress):
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

    def answer(self, number: int) -> StepResult | CallResult | CallFailed:
        """Wait for answer `number`. Each answer can be fetched once."""
        while number not in self._answers:
            self._store(self._receive())
        return self._answers.pop(number)

    def ready(self) -> list[StepResult | CallResult | CallFailed]:
        """The answers that have come and that nothing has fetched. It does not wait, and not during the start."""
        with contextlib.suppress(EOFError, OSError):
            while self._num_sent and self._pipe.poll(0):
                self._store(decode_up(self._pipe.recv_bytes()))
        return list(self._answers.values())

    def look(self, number: int) -> StepResult | CallResult | CallFailed | None:
        """Answer `number`, if it has come. It can still be fetched."""
        self.ready()
        return self._answers.get(number)

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the child, if it is on this machine."""
        return isinstance(self.process, subprocess.Popen) and is_stopped(self.process.pid)

    def _store(self, message: Up) -> None:
        if isinstance(message, WorkerEnded):
            self.fail(message)
        if isinstance(message, WorkerProgress | WorkerStarted | WorkerEnded):
            raise RuntimeError(f"{type(message).__name__} is unexpected")
        self._num_answered += 1
        self._answers[self._num_answered] = message

    def _send(self, data: bytes) -> None:
        self._check_alive()
        try:
            self._pipe.send_bytes(data)
        except OSError:
            self.fail()

    def _receive(self) -> Up:
        """The next message. Raises the cause of death if the child has died."""
        self._check_alive()
        try:
            while not self._pipe.poll(LOOK_AGAIN_S):
                if self.process.poll() is not None and not self._pipe.poll(0):
                    self.fail()
                self._on_wait()
            message = decode_up(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.fail()
        if isinstance(message, WorkerEnded):
            self.fail(message)
        return message

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def fail(self, last: WorkerEnded | None = None) -> None:
        """The child is dead or dying: raise the cause, now and at every later use."""
        while last is None:  # the child may have sent a last message
            try:
                if not self._pipe.poll(0):
                    break
                message = decode_up(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            last = message if isinstance(message, WorkerEnded) else None
        self._dead = self._cause(last)
        raise self._dead

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
        if starting and isinstance(error, ConfigError):
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
        self._answer: StepResult | CallResult | CallFailed | None = None

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
