"""The engine's state, in memory that its host writes and the front rooms read.

It lies in a memory file (memfd), on no disk, so a full, small or missing temporary directory cannot keep a new state from
the readers. Knows states and bytes. Does not know processes.

    number: 8 bytes, length: 4, crc of the data: 4, data (msgpack)      a crc that does not fit: it is being written
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

from quire.protocol.output import EngineReady

ROOM = 1 << 18  # bytes of a state
MOST_TEXT = 4000  # characters of an error, where a state has too many bytes
HEAD = struct.Struct("<QII")

Condition = Literal["starting", "ready", "restarting", "delayed", "dead", "closed"]


class EngineState(Struct):
    """How the engine stands."""

    generation: int
    condition: Condition
    ready: EngineReady | None = None
    error: str = ""
    traceback: str = ""
    lost: list[str] = []
    """Requests that had a row in the process before this one: they are not sent again."""
    recorded: bool = False
    """`lost` is complete: the steps of that process were recorded to its end."""
    poison: list[str] = []
    """Digests (`quarantine.py`) of requests that ran at two deaths of the engine: they are refused."""
    incident: str = ""
    """The word under which the log has `error`. Clients are told this word and not the error."""


class StateBoard:
    """Publishes states, or reads those of another process.

    Args:
        fd: of the board to read; None makes a board to publish on.
    """

    def __init__(self, fd: int | None = None):
        self.owned = fd is None
        self.fd = memory_file() if fd is None else fd
        self._map = mmap.mmap(self.fd, HEAD.size + ROOM)
        self._number = 0
        self.now = EngineState(1, "starting")
        if self.owned:
            self.publish(self.now)

    def publish(self, state: EngineState) -> None:
        """A state that has no room is published without its lists."""
        self.now = state
        data = msgspec.msgpack.encode(state)
        if len(data) > ROOM:
            data = msgspec.msgpack.encode(msgspec.structs.replace(
                state, error=state.error[:MOST_TEXT], traceback=state.traceback[-MOST_TEXT:], lost=[],
                recorded=False, poison=[],
            ))  # fmt: skip
        self._number += 1
        self._map[HEAD.size : HEAD.size + len(data)] = data
        self._map[: HEAD.size] = HEAD.pack(self._number, len(data), crc32(data))

    def look(self) -> EngineState:
        """The latest state; the one before it while a new one is being written."""
        if self.owned:
            return self.now
        number, length, crc = HEAD.unpack_from(self._map)
        if number != self._number and length <= ROOM:
            data = self._map[HEAD.size : HEAD.size + length]
            if crc32(data) == crc:
                self.now, self._number = msgspec.msgpack.decode(data, type=EngineState), number
        return self.now

    def close(self) -> None:
        """Give the file back; the last state can still be looked at."""
        self.look()
        self.owned = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def memory_file() -> int:
    """A file of HEAD.size + ROOM bytes in memory; a temporary file on systems that have no memory files."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quire-state")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, HEAD.size + ROOM)
    return fd
