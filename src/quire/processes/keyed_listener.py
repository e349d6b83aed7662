"""KeyedListener: accepts connections; the peer of each proves a key in a thread of its own (`keyed_socket.py`).

The number of peers that have not proven a key yet is bounded. A further peer takes the place of the oldest one of the address
that has the most, so silent peers keep no other out. Does not know what connections are for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from quire.logging import get_logger
from quire.processes.keyed_socket import KeyRefused, accept

log = get_logger(__name__)

MAX_UNPROVEN = 32
"""Connections whose peers have not proven a key yet."""
WARN_EVERY_S = 10
"""Refused connections in this time are one line of the log."""


class KeyedListener:
    """One port.

    Args:
        listener: is closed by `close`.
        keys: of which a peer must have one.
        serve: called in the connection's thread with the connection and the number of the key.
        refused: called with a peer's address and why it was refused.
    """

    def __init__(
        self,
        listener: socket.socket,
        keys: Sequence[bytes],
        serve: Callable[[Connection, int], None],
        refused: Callable[[str, Exception], None] = lambda where, why: None,
    ):
        self._listener, self._keys = listener, keys
        self._serve, self._refused = serve, refused
        self._unproven: dict[socket.socket, str] = {}  # -> address; the oldest first
        self._lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._accept, name="keyed-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more. Connections that were given to `serve` stay."""
        self._open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for peer in self._unproven:
                _shut(peer)

    def _accept(self) -> None:
        while True:
            try:
                peer, address = self._listener.accept()
            except OSError:
                if not self._open:
                    return
                time.sleep(0.1)  # no descriptors are free
                continue
            self._take_place(peer, str(address[0]))
            threading.Thread(target=self._prove, args=(peer,), name="peer", daemon=True).start()

    def _take_place(self, peer: socket.socket, where: str) -> None:
        with self._lock:
            if len(self._unproven) >= MAX_UNPROVEN:
                crowded = Counter(self._unproven.values()).most_common(1)[0][0]
                oldest = next(other for other, of in self._unproven.items() if of == crowded)
                del self._unproven[oldest]
                _shut(oldest)  # its thread ends
            self._unproven[peer] = where

    def _prove(self, peer: socket.socket) -> None:
        with self._lock:
            where = self._unproven.get(peer, "an address with too many connections")
        try:
            connection, number = accept(peer, self._keys)
        except (KeyRefused, OSError) as why:
            log.warning_every("refused", WARN_EVERY_S, "refused a connection from %s: %s", where, why)  # fmt: skip
            self._refused(where, why)
            return
        finally:
            with self._lock:
                self._unproven.pop(peer, None)
        self._serve(connection, number)


def _shut(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
