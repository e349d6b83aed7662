"""Writing to standard output and error such that a slow or closed reader can neither block nor end the process.

If a pipe is not read, a terminal is stopped (Ctrl-S), a pipe is closed or a disk is full, lines are dropped. The next
line that can be written reports how many. Knows file descriptors. Does not know what the lines mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import sys
from typing import TextIO

WAIT_S = 0.05  # how long a write waits for a reader that has kept up so far


class Output:
    """An output stream of this process, written without blocking."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.dropped = 0  # lines dropped since the last successful write
        self._fd = -1
        self._socket: socket.socket | None = None
        try:
            fd = stream.fileno()
            kind = os.fstat(fd).st_mode
        except (OSError, ValueError, AttributeError):
            return  # a program's own stream object, without a descriptor
        self._fd = fd
        with contextlib.suppress(OSError):  # on failure, write to the original descriptor
            if stat.S_ISSOCK(kind):
                self._socket = socket.socket(fileno=os.dup(fd))
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
                # Open a separate file description: O_NONBLOCK on the shared one would also affect other programs.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open(f"/proc/self/fd/{fd}", flags)

    def write(self, text: str) -> None:
        """Write, or drop the text and count it."""
        try:
            if self.dropped:
                note = f"({self.dropped} log lines were dropped, because the output blocked)\n"
                self._write(note, wait=0.0)
                self.dropped = 0
                self._write(text, wait=0.0)
            else:
                self._write(text, wait=WAIT_S)
        except (OSError, ValueError):
            self.dropped += 1

    def _write(self, text: str, wait: float) -> None:
        if self._fd < 0:
            self.stream.write(text)
            self.stream.flush()
            return
        data = text.encode("utf-8", "backslashreplace")
        while data:
            if not self._is_ready(wait):
                raise BlockingIOError
            data = data[self._send(data) :]

    def _is_ready(self, wait: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(1000 * wait))

    def _send(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        # poll() says that a pipe has room for this
        return os.write(self._fd, data[: select.PIPE_BUF])

    def close(self) -> None:
        """Close the descriptors that this object opened."""
        if self._socket is not None:
            self._socket.close()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._fd >= 0 and self._fd != self.stream.fileno():
                os.close(self._fd)
        self._fd = -1


class OutputHandler(logging.StreamHandler[TextIO]):
    """A log handler that writes through an Output."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.output = Output(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self.stream is not self.output.stream:  # setStream, or a test replaced it
            self.output = Output(self.stream)
        self.output.write(f"{line}\n")

    def close(self) -> None:
        self.output.close()
        super().close()


def show(text: str, stream: TextIO | None = None) -> None:
    """Like print, but a closed or full output raises no error."""
    output = Output(stream or sys.stdout)
    output.write(f"{text}\n")
    output.close()
