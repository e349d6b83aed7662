"""RankProcess: the worker of one rank, in a process of its own.

Knows one socket and one child process. Does not know what a plan means. The child is a new program, not a fork:
a user's script needs no `__main__` guard, and nothing of this process is copied. No torch here.

Only one thread may use it at a time, as EngineCore does. A wait ends when the child ends: its socket closes. `MultiprocExecutor`
finds a child that is stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Protocol

from quire.config.serialize import import_path
from quire.errors import ConfigError, EngineDeadError, RankLost, StartupError
from quire.executor.messages import (
    Answer,
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
from quire.processes.keyed_socket import socket_of
from quire.startup_timer import Report, no_report

LOOK_AGAIN_S = 1.0  # how often a wait looks whether the child runs: the socket may not close
END_S = 5.0  # how long a child may take to end after its socket is closed
STUCK_S = 60
"""How long the rest of a message that has begun may make no progress: the child is stopped."""


class FarProcess(Protocol):
    """A process on another machine, as far as this one can see and end it."""

    def poll(self) -> int | None:
        """None: it runs."""

    def kill(self) -> None: ...

    def how_it_ended(self) -> str: ...


Start = Callable[[], tuple[Connection, "subprocess.Popen[bytes] | FarProcess"]]


class RankProcess:
    """One child process. `wait_started` must be called first.

    Args:
        target: "module:function"; the child calls it with `payload` and a `Report` to create the worker.
        start: starts the child, or finds it on another machine; returns this end of its connection, and the process.
        report: receives the child's reports.
    """

    def __init__(self, target: str, payload: bytes, start: Start, report: Report = no_report):
        self._pipe, process = start()
        self.process, self._report = process, report
        self._stops = StopCounter(process.pid) if isinstance(process, subprocess.Popen) else None
        self._num_sent = self._num_answered = 0
        self._is_started = False
        self._answers: dict[int, Answer] = {}  # those that nothing has fetched
        self._dead: Exception | None = None
        try:
            limit = struct.pack("ll", STUCK_S, 0)
            with socket_of(self._pipe) as end:
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    end.setsockopt(socket.SOL_SOCKET, option, limit)
            reports = report is not no_report
            self._send(encode(StartWorker(target, payload, import_path(), reports)))
        except BaseException:
            self.close()
            raise

    def wait_started(self, on_wait: Callable[[], None]) -> None:
        """Wait until the worker is created. `on_wait` is called now and then; its exceptions end the wait.

        Raises:
            ConfigError, NotEnoughMemory, ...: the child found an error in the configuration.
            StartupError: the child could not create the worker for another reason; `detail` has its traceback.
        """
        while not isinstance(message := self._receive(LOOK_AGAIN_S), WorkerStarted):
            if message is None:
                on_wait()
            elif isinstance(message, WorkerProgress):
                self._report(message.stage, message.share)
            else:
                raise RuntimeError(f"{type(message).__name__} came before the worker was created")
        self._is_started = True

    def lost(self) -> str:
        """As `Executor.lost`."""
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
        """Answer `number`, which `look` has found. Each answer can be fetched once."""
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
        starting = not self._is_started
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


def spawn(fds: Sequence[int] = ()) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a child on this machine. It inherits the descriptors `fds`."""
    parent_end, child_end = Pipe()
    try:
        child = start_worker(child_end, fds)
    except BaseException:
        parent_end.close()
        raise
    finally:
        child_end.close()  # or this process would never see the child's end close
    return parent_end, child


def start_worker(connection: Connection, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a worker's process at the end of this connection; it has a copy, and inherits the descriptors `fds`."""
    fd = connection.fileno()
    lasting = int(threading.current_thread() is threading.main_thread())
    arguments = [fd, os.getpid(), lasting]
    return start_child("quire.executor.worker_main", arguments, fds=[fd, *fds])
