"""The engine's state, in shared memory that its supervisor writes and the frontends read.

It is a memory file (memfd), not on a disk, so readers get a new state even if the temporary directory is full, small or
missing. Knows states and bytes. Does not know processes.

    number: 8 bytes, length: 4, crc of the data: 4, data (msgpack)      a wrong crc: a new state is being written
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import Literal
from zlib import crc32

import msgspec
from msgspec import Struct

from quire.protocol.output import EngineReady, StartupStatus

ROOM = 1 << 18  # the most bytes of a state
MOST_TEXT = 4000  # characters of an error that are kept if a state has too many bytes
HEAD = struct.Struct("<QII")

Condition = Literal["starting", "ready", "restarting", "delayed", "dead", "closed"]


class EngineState(Struct):
    """The state of the engine."""

    epoch: int
    """The number of the engine's process; 0: it has no process of its own."""
    condition: Condition
    ready: EngineReady | None = None
    error: str = ""
    traceback: str = ""
    lost: dict[str, int] = {}
    """Requests that had a row in the previous process, and how many tokens each had."""
    blamed: list[str] = []
    """Ids of those that its death is blamed on: all that had a row at the end, or the one on trial."""
    recorded: bool = False
    """`lost` is complete: the steps of that process were recorded up to its end."""
    poison: list[str] = []
    """Digests (`poison_requests.py`) of requests that ran at two deaths of the engine: they are refused."""
    startup: StartupStatus = StartupStatus("starting the engine")
    """How far the start is, until `ready`."""
    incident: str = ""
    """An id under which the log has `error`. Clients get this id instead of the error."""


class StateBoard:
    """Publishes states, or reads another process's states.

    Args:
        fd: the board to read; None creates a board for publishing.
    """

    def __init__(self, fd: int | None = None):
        self.owned = fd is None
        self.fd = memory_file() if fd is None else fd
        self._map = mmap.mmap(self.fd, HEAD.size + ROOM)
        self._number = 0
        self.latest = EngineState(1, "starting")
        if self.owned:
            self.publish(self.latest)

    def publish(self, state: EngineState) -> None:
        """Publish a state. If it is too large, its lists are left out and its texts are shortened."""
        self.latest = state
        data = msgspec.msgpack.encode(state)
        if len(data) > ROOM:
            data = msgspec.msgpack.encode(msgspec.structs.replace(
                state, error=state.error[:MOST_TEXT], traceback=state.traceback[-MOST_TEXT:], lost={},
                blamed=[], recorded=False, poison=[],
            ))  # fmt: skip
        self._number += 1
        self._map[HEAD.size : HEAD.size + len(data)] = data
        self._map[: HEAD.size] = HEAD.pack(self._number, len(data), crc32(data))

    def read(self) -> EngineState:
        """The latest state; while a new one is being written, the one before it."""
        if self.owned:
            return self.latest
        number, length, crc = HEAD.unpack_from(self._map)
        if number != self._number and length <= ROOM:
            data = self._map[HEAD.size : HEAD.size + length]
            if crc32(data) == crc:
                self.latest, self._number = msgspec.msgpack.decode(data, type=EngineState), number
        return self.latest

    def close(self) -> None:
        """Close the file; `read` still returns the last state."""
        self.read()
        self.owned = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def memory_file() -> int:
    """A file of HEAD.size + ROOM bytes in memory; a temporary file on systems without memory files."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quire-state")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, HEAD.size + ROOM)
    return fd
