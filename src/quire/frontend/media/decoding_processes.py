"""The processes that decode files of strangers: a few of one program, each replaced when it was ended.

Knows processes and time. Does not know what they decode: a subclass names the program and its first message.
Blocks: call `ask` in a thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from quire.errors import ValidationError
from quire.logging import get_logger
from quire.processes.isolated_child import IsolatedChild, ProcessEnded, send

log = get_logger(__name__)

START_S = 120.0  # to import libraries
WALL_S = 30.0  # for a file: other processes share the cores
MEMORY = 2 << 30  # of a process, above what it needs to begin
FAILED_START_S = 10.0  # after a process that could not begin, no other is started for this time


class DecodingProcesses:
    """Thread-safe. The first file starts a process, unless `prepare` did."""

    module: ClassVar[str]
    environment: ClassVar[dict[str, str]]
    what: ClassVar[str]
    """What cannot be read where no process begins."""

    def __init__(self, count: int | None = None, memory: int = MEMORY):
        self.memory = memory
        self.count = count or max(1, (os.cpu_count() or 1) // 4)
        self.replaced = 0
        """Processes that were ended, by a limit or by a file."""
        self._slots = threading.Semaphore(self.count)
        self._idle: list[IsolatedChild] = []
        self._failed = (0.0, "")  # when, and why, the last process could not begin
        self.close: Callable[[], object] = weakref.finalize(self, _close, self._idle)

    def first_message(self) -> bytes:
        """What a new process gets."""
        raise NotImplementedError

    def decode(self, answer: bytearray) -> Any:
        """A message of a process. Raises msgspec.MsgspecError: it is none."""
        raise NotImplementedError

    def ask(
        self, message: bytes, file: bytes | bytearray | None = None, wall_s: float = WALL_S
    ) -> Any:
        """The answer of a process. `file`: a second message, whose bytes are not copied.

        Raises:
            ProcessEnded: a limit has ended it. ValidationError: none can be started.
        """
        with self._slots:
            child = self._child()
            try:
                until = time.monotonic() + wall_s
                if file is not None:
                    send(child.pipe, message, until)
                answer = self.decode(child.ask(message if file is None else file, until))
            except (ProcessEnded, msgspec.MsgspecError) as error:
                child.end()
                self.replaced += 1
                raise ProcessEnded(str(error)) from error
            except BaseException:
                child.end()
                raise
            self._idle.append(child)
        return answer

    def prepare(self) -> None:
        """Start a process, and wait for it."""
        with self._slots:
            self._idle.append(self._child())

    def _child(self) -> IsolatedChild:
        """A process that is ready. Raises ValidationError: none can be started."""
        while self._idle:
            try:
                child = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if child.process.poll() is None:
                return child
            child.end()
            self.replaced += 1
        when, why = self._failed
        if not why or time.monotonic() - when > FAILED_START_S:
            child, why = self._started()
            if not why:
                return child
            child.end()
            log.error("%s cannot be processed: %s", self.what, why)
            self._failed = time.monotonic(), why
        raise ValidationError(
            f"{self.what} cannot be processed now; the server's log says why: send text"
        )

    def _started(self) -> tuple[IsolatedChild, str]:
        child = IsolatedChild(self.module, **self.environment)
        try:
            ready = self.decode(child.ask(self.first_message(), time.monotonic() + START_S))
        except (ProcessEnded, msgspec.MsgspecError) as error:
            return child, f"the process ended ({error})"
        return child, str(getattr(ready, "error", "the process gives no answer"))


def _close(idle: list[IsolatedChild]) -> None:
    while idle:
        idle.pop().end()
