"""The status pipe from a child process to its supervisor. It breaks when the process ends.

Knows frames (4 bytes of length, msgpack) and file descriptors. Does not know how a death is handled.
"""

from __future__ import annotations

import os
import struct
import threading
from multiprocessing.connection import wait as ready_for_reading

import msgspec

from quire.protocol.output import Lifeline

MOST = 1 << 24  # bytes; a longer frame is invalid


class StatusWriter:
    """The child's end; several threads may send."""

    def __init__(self, fd: int):
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, message: Lifeline) -> None:
        """Raises OSError: the reader is gone."""
        data = msgspec.msgpack.encode(message)
        data = struct.pack("<I", len(data)) + data
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class StatusReader:
    """The parent's end."""

    def __init__(self, fd: int):
        self._fd = fd
        self._data = b""
        self._decoder = msgspec.msgpack.Decoder(Lifeline)
        self.broken = False

    def fileno(self) -> int:
        return self._fd

    def poll(self, wait: float) -> list[Lifeline]:
        """The messages received within at most `wait` seconds; sets `broken` when the other end is gone.

        Never waits for the rest of a message: the child may freeze while it writes.
        """
        if self.broken or not ready_for_reading([self._fd], wait):
            return []
        data = os.read(self._fd, 1 << 16)
        self.broken = not data
        self._data += data
        heard: list[Lifeline] = []
        while len(self._data) >= 4:
            (length,) = struct.unpack_from("<I", self._data)
            if length > MOST:
                self.broken = True
                break
            if len(self._data) < 4 + length:
                break
            heard.append(self._decoder.decode(self._data[4 : 4 + length]))
            self._data = self._data[4 + length :]
        return heard

    def close(self) -> None:
        """May be called twice."""
        self.broken = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
