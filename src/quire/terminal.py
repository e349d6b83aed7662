"""Writing to standard output and error so that no reader can hold a process up, or end it.

A pipe that nobody reads, a terminal that is stopped (Ctrl-S), a closed pipe and a full disk cost the lines, and the next line
that can be written says how many. Knows file descriptors. Does not know what the lines say.
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

WAIT_S = 0.05  # what a reader that was not behind before is waited for


class Output:
    """A stream of this process, written without waiting."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.dropped = 0  # lines since the last that could be written
        self._fd = -1
        self._socket: socket.socket | None = None
        try:
            fd = stream.fileno()
            kind = os.fstat(fd).st_mode
        except (OSError, ValueError, AttributeError):
            return  # a program's own stream
        self._fd = fd
        with contextlib.suppress(OSError):  # else the stream's own flags hold
            if stat.S_ISSOCK(kind):
                self._socket = socket.socket(fileno=os.dup(fd))
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
                # A description of our own: O_NONBLOCK on the shared one would change other programs' writing.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open(f"/proc/self/fd/{fd}", flags)

    def write(self, text: str) -> None:
        """Write, or drop the text and count it."""
        try:
            if self.dropped:
                note = f"({self.dropped} lines were dropped: they could not be written)\n"
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
        return os.write(self._fd, data[: select.PIPE_BUF])  # ready for a pipe: room for that much

    def close(self) -> None:
        """Give descriptors of our own back."""
        if self._socket is not None:
            self._socket.close()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._fd >= 0 and self._fd != self.stream.fileno():
                os.close(self._fd)
        self._fd = -1


class OutputHandler(logging.StreamHandler[TextIO]):
    """Log lines through an Output."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.output = Output(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self.stream is not self.output.stream:  # setStream, or a test's own
            self.output = Output(self.stream)
        self.output.write(f"{line}\n")

    def close(self) -> None:
        self.output.close()
        super().close()


def show(text: str, stream: TextIO | None = None) -> None:
    """As print, which a closed or full output makes fail."""
    output = Output(stream or sys.stdout)
    output.write(f"{text}\n")
    output.close()
