"""Rendezvous: how ranks on several machines find each other: a table of values that all of them can set and wait for.

Knows the messages, the table, and a client of it. Does not know what the values are (`gloo.py`), or where the table is
(the head's control port, `executor/control_port.py`). No torch here.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
from msgspec import Struct

from quire.errors import RankLost

MAX_BYTES = 1 << 20
"""The largest message."""


class SetValue(Struct, array_like=True, tag="set"):
    key: str
    value: bytes


class WaitForValue(Struct, array_like=True, tag="wait"):
    key: str
    seconds: float


_decoder = msgspec.msgpack.Decoder(SetValue | WaitForValue)


class RendezvousTable:
    """The values of one generation of ranks. Several threads may serve."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def serve(self, connection: Connection) -> None:
        """Answer a client until it closes the connection."""
        with suppress(EOFError, OSError, msgspec.MsgspecError), connection:
            while True:
                found = self._answer(_decoder.decode(connection.recv_bytes(MAX_BYTES)))
                connection.send_bytes(msgspec.msgpack.encode(found))

    def _answer(self, message: SetValue | WaitForValue) -> bytes | None:
        with self._changed:
            if isinstance(message, SetValue):
                self._values[message.key] = message.value
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: message.key in self._values, message.seconds)
            return self._values.get(message.key)


class RendezvousClient:
    """The table in another process. One thread at a time.

    Args:
        seconds: how long `get` waits for a value.
    """

    def __init__(self, connection: Connection, seconds: float):
        self._connection, self.seconds = connection, seconds

    def set(self, key: str, value: bytes) -> None:
        self._ask(SetValue(key, value))

    def get(self, key: str) -> bytes:
        """Raises RankLost: no rank has set the value in time."""
        if (found := self._ask(WaitForValue(key, self.seconds))) is None:
            raise RankLost(f"another rank has not set {key!r} after {self.seconds:.0f} s")
        return found

    def _ask(self, message: SetValue | WaitForValue) -> bytes | None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
            data = self._connection.recv_bytes(MAX_BYTES)
        except (EOFError, OSError):
            raise RankLost("the engine's process closed the rendezvous of its ranks") from None
        return msgspec.msgpack.decode(data, type=bytes | None)
