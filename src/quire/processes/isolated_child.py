"""A child process for untrusted input: it gets no secrets, each message has a deadline, and it may be killed at any time.

Knows one program, its socket, and frames: the length in 4 bytes, then the message. Does not know what a message says, or
how the child limits itself.
"""

from __future__ import annotations

import socket
import time

from quire import env
from quire.processes.child import start_child, wait_or_kill

MAX_MESSAGE_BYTES = 1 << 30  # masks of 8,192 rows and a million tokens


class ProcessEnded(Exception):
    """The peer process has ended, or did not answer in time."""


class IsolatedChild:
    """Runs `python -m MODULE FD`; the child's end of the socket is FD. Any thread may `end` it.

    Args:
        environment: variables that it gets besides those that Python needs.

    Raises:
        OSError: no process, memory or descriptor is free.
    """

    def __init__(self, module: str, **environment: str):
        self.pipe, child_end = socket.socketpair()
        try:
            with child_end:
                fd = child_end.fileno()
                environment = {**env.bare_for_a_child(), **environment}
                self.process = start_child(module, [fd], fds=[fd], environment=environment)
        except BaseException:
            self.pipe.close()
            raise

    def ask(
        self, message: bytes | bytearray, until: float, most: int = MAX_MESSAGE_BYTES
    ) -> bytearray:
        """Send a message and return the answer. Arguments as for `receive`. Raises ProcessEnded."""
        send(self.pipe, message, until)
        return receive(self.pipe, until, most)

    def end(self, seconds: float = 0.0) -> None:
        """Close the socket, and kill the child if it has not ended after that time."""
        self.pipe.close()
        wait_or_kill(self.process, seconds)


def send(
    pipe: socket.socket, data: bytes | bytearray | memoryview, until: float | None = None
) -> None:
    """Raises ProcessEnded. `until`: a time of `time.monotonic`."""
    try:
        _limit(pipe, until)
        pipe.sendall(len(data).to_bytes(4))
        pipe.sendall(data)
    except OSError as error:
        raise ProcessEnded(str(error)) from error


def receive(
    pipe: socket.socket, until: float | None = None, most: int = MAX_MESSAGE_BYTES
) -> bytearray:
    """Raises ProcessEnded. `most`: the largest valid size of the message in bytes."""
    size = int.from_bytes(_read(pipe, 4, until))
    if size > most:
        raise ProcessEnded(f"a message of {size} bytes")
    return _read(pipe, size, until)


def _read(pipe: socket.socket, size: int, until: float | None) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    try:
        while rest:
            _limit(pipe, until)
            if not (got := pipe.recv_into(rest)):
                raise ProcessEnded("no more")
            rest = rest[got:]
    except OSError as error:
        raise ProcessEnded(str(error)) from error
    return found


def _limit(pipe: socket.socket, until: float | None) -> None:
    if until is not None:
        pipe.settimeout(max(until - time.monotonic(), 0.001))
