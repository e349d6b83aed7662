"""Rendezvous: how ranks on several machines find each other: a table of values that all of them can set and wait for.

Knows the message and the table. Does not know its client, which is torch's store of a rank (`gloo.py`), or where the table is (the
head's control port, `executor/control_port.py`). No torch here.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
from msgspec import Struct

MAX_BYTES = 1 << 20
"""The largest message."""


class TableRequest(Struct, array_like=True):
    """Set the value of a key, if there is one; else wait for it. The answer is the value; None: no rank has set it in time."""

    key: str
    value: bytes | None = None
    seconds: float = 0.0


_decoder = msgspec.msgpack.Decoder(TableRequest)


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

    def _answer(self, message: TableRequest) -> bytes | None:
        with self._changed:
            if message.value is not None:
                self._values[message.key] = message.value
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: message.key in self._values, message.seconds)
            return self._values.get(message.key)
