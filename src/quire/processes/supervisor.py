"""SupervisedProcess: a running child and its status pipe. Supervisors of engines and of HTTP workers own such processes.

Knows processes and time. Does not know what the messages say, or what follows a death (`restart_policy.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from quire.processes.child import STACKS, end_child, wait_or_kill
from quire.processes.status_pipe import StatusReader
from quire.processes.watchdog import SUSPENDED_S
from quire.protocol.output import Lifeline

STACKS_S = 1.0  # for a hanging process to write its stacks


class SupervisedProcess:
    """Starts a child, and notes when it was heard last.

    Args:
        spawn: starts the child; is given the descriptor of its end of the status pipe.

    Raises:
        OSError: no process or descriptor is free.
    """

    def __init__(self, spawn: Callable[[int], subprocess.Popen[bytes]]):
        reading, writing = os.pipe()
        try:
            self.process = spawn(writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.status = StatusReader(reading)
        self.heard = self.polled = time.monotonic()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def send_signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            self.process.send_signal(number)

    def poll(self, wait: float) -> list[Lifeline]:
        """The messages received within at most `wait` seconds. Call it again within SUSPENDED_S."""
        messages = self.status.poll(wait)
        now = time.monotonic()
        was_suspended = now - self.polled > wait + SUSPENDED_S  # and perhaps the child, too
        if messages or was_suspended:
            self.heard = now
        self.polled = now
        return messages

    def is_silent(self, seconds: float) -> bool:
        """Whether it was not heard for so long; 0: never."""
        return 0 < seconds < time.monotonic() - self.heard

    def kill_hanging(self) -> None:
        """Let it write its stacks to the log, then kill it."""
        self.send_signal(STACKS)
        time.sleep(STACKS_S)
        wait_or_kill(self.process, 0.0)

    def end(self, seconds: float) -> None:
        """Stop it if it is alive, kill it after that time, and close the pipe."""
        self.status.close()
        end_child(self.process, seconds)
