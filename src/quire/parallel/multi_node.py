"""Machines: which rank is on which machine, and how a rank reaches ranks on other machines. No torch here until `meet`.

The ranks find each other through the head's rendezvous (`rendezvous.py`), or through torchrun's store (`torchrun.py`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from quire.errors import RankLost
from quire.processes.keyed_listener import KeyedListener
from quire.processes.keyed_socket import connect, listen

if TYPE_CHECKING:
    from quire.parallel.gloo import GlooGroup

MEET_S = 40.0
"""How long ranks wait for each other at the start, so that a wrong address ends it within a minute."""
EXCHANGE_S = 300.0
"""How long a rank waits for another in an exchange, unless cpu_distributed_timeout_seconds says otherwise. The executor ends
all ranks when one ends, so this is for a rank that is alive and does not come."""


class Machines(Struct, array_like=True):
    """Of one rank.

    Attributes:
        nodes: the machine of each rank.
        host: this machine's address, at which ranks of others reach this rank.
        meeting: host and port of the head's rendezvous.
        key: of the rendezvous.
        exchange_s: how long this rank waits for another in an exchange.
    """

    nodes: list[int]
    host: str
    meeting: tuple[str, int] = ("", 0)
    key: bytes = b""
    exchange_s: float = EXCHANGE_S

    def spans(self, group: Sequence[int]) -> bool:
        """Whether these ranks are on several machines."""
        return len({self.nodes[rank] for rank in group}) > 1

    def place(self, rank: int) -> tuple[int, int]:
        """The rank's number among the ranks of its machine, and their number."""
        local = [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]
        return local.index(rank), len(local)

    def meet(self) -> Any:
        """Torch's store through which the ranks find each other: one for all groups of this rank.

        Raises:
            StartupError: it does not answer.
        """
        from quire.parallel.gloo import RendezvousStore

        return RendezvousStore(connect(*self.meeting, self.key, MEET_S), MEET_S)

    def look(self) -> None:
        """Called each second of a wait for other ranks. The executor looks at them, so here nothing is to do."""

    def group(self, store: Any, name: str, ranks: Sequence[int], rank: int) -> GlooGroup:
        """The exchange of a group.

        Args:
            store: of `meet`.
            name: of the group, of no other.

        Raises:
            RankLost: the others did not come in time.
        """
        from quire.parallel.gloo import GlooGroup, prefixed

        own = prefixed(name, store)
        found = GlooGroup(own, ranks.index(rank), len(ranks), self.host, MEET_S, self.look)
        found.limit(self.exchange_s)
        return found

    def sockets(
        self, store: Any, pairs: Sequence[tuple[str, int, int]], rank: int
    ) -> dict[str, int]:
        """Connect this rank with others, by TCP.

        Args:
            store: of `meet`.
            pairs: name of a connection, the rank that connects, and the rank that listens; the same on all ranks.

        Returns:
            For each connection of this rank, by name, a descriptor of its end.

        Raises:
            RankLost, StartupError: another rank did not come in time.
        """
        found: dict[str, int] = {}
        waiting: dict[str, socket.socket] = {}
        for name, _, server in pairs:
            if server == rank:
                waiting[name] = listener = listen(self.host, 0)
                store.set(f"socket {name}", f"{self.host} {listener.getsockname()[1]}")
        for name, client, _ in pairs:
            if client == rank:
                host, _, port = store.get(f"socket {name}").decode().rpartition(" ")
                with connect(host, int(port), self.key, MEET_S) as connection:
                    found[name] = os.dup(connection.fileno())
        for name, listener in waiting.items():
            found[name] = self._accepted(name, listener)
        return found

    def _accepted(self, name: str, listener: socket.socket) -> int:
        """A descriptor of the first connection whose peer proves the key."""
        proven: SimpleQueue[Connection] = SimpleQueue()
        keyed = KeyedListener(listener, [self.key], lambda connection, _: proven.put(connection))
        try:
            with proven.get(timeout=MEET_S) as connection:
                return os.dup(connection.fileno())
        except Empty:
            raise RankLost(f"no rank connected as {name!r} after {MEET_S:.0f} s") from None
        finally:
            keyed.close()
