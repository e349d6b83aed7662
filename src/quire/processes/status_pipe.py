"""The status pipe from a child process to its supervisor. It breaks when the process ends.

Knows messages and file descriptors. Does not know how a death is handled.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

import msgspec

from quire.protocol.output import Lifeline

MOST = 1 << 24  # bytes; a longer message is invalid


class StatusWriter:
    """The child's end; several threads may send."""

    def __init__(self, fd: int):
        self._pipe = Connection(fd, readable=False)
        self._lock = threading.Lock()

    def send(self, message: Lifeline) -> None:
        """Raises OSError: the reader is gone."""
        with self._lock:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))


class StatusReader:
    """The parent's end."""

    def __init__(self, fd: int):
        self._pipe = Connection(fd, writable=False)
        self._decoder = msgspec.msgpack.Decoder(Lifeline)
        self.broken = False

    def fileno(self) -> int:
        return self._pipe.fileno()

    def poll(self, wait: float) -> list[Lifeline]:
        """The messages received within at most `wait` seconds; sets `broken` when the other end is gone."""
        heard: list[Lifeline] = []
        try:
            while not self.broken and self._pipe.poll(0 if heard else wait):
                heard.append(self._decoder.decode(self._pipe.recv_bytes(MOST)))
        except (EOFError, OSError):
            self.broken = True
        return heard

    def close(self) -> None:
        """May be called twice."""
        self.broken = True
        self._pipe.close()
