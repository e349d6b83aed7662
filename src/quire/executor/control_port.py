"""ControlPort: where the nodes of one engine connect to its head, and the ranks' connections come from.

Knows keys, the messages of nodes and what all nodes must have in common, as texts. Does not know configurations. A peer
without the key is refused before it can send a message. No torch here.

Each connection has a thread: of nodes (few), of their ranks until the executor takes the connection, of rendezvous.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from quire.errors import StartupError
from quire.executor.node_messages import (
    MAX_BYTES,
    NodeAccepted,
    NodeEnds,
    NodeJoins,
    NodeRefused,
    RankJoins,
    decode,
    encode,
)
from quire.logging import get_logger
from quire.parallel.rendezvous import RendezvousTable
from quire.processes.keyed_listener import KeyedListener
from quire.processes.keyed_socket import PROOF_S, address_of, listen, socket_of

log = get_logger(__name__)

MAX_DIFFERENCES = 5
LOOK_AGAIN_S = 1.0
ESTABLISHED = 1  # of TCP connections, in Linux


class RankOnNode:
    """A rank's process on another machine: a FarProcess (`rank_process.py`), of which this machine only has the connection."""

    def __init__(self, connection: Connection, where: str):
        self._connection, self.where = connection, where

    def poll(self) -> int | None:
        """None: the connection is whole. Its state is the kernel's, for unread messages may come before its end."""
        try:
            with socket_of(self._connection) as end:
                state = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:  # it was closed; another thread may close it
            return 1
        return None if state == ESTABLISHED else 1

    def kill(self) -> None:
        """The process ends when its connection closes, whatever it does."""
        self._connection.close()

    def how_it_ended(self) -> str:
        return f"on {self.where} has ended, or the connection to it broke"


class ControlPort:
    """The head's end.

    Args:
        host, port: to listen on; this address only.
        key: of the cluster.
        facts: what all nodes must have in common, of this machine.
        ranks: how many ranks each of the other nodes has: node -> number.
        first_rank: the first of them; ranks are in the order of nodes.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        facts: Mapping[str, str],
        ranks: Mapping[int, int],
        first_rank: int = 0,
    ):
        listener = listen(host, port)
        self.host, self.port = host, int(listener.getsockname()[1])
        self._facts, self.expected = facts, dict(ranks)
        self.first_ranks: dict[int, int] = {}
        for node, count in sorted(ranks.items()):
            self.first_ranks[node] = first_rank
            first_rank += count
        self.rendezvous_key = secrets.token_bytes(32)
        self._table = RendezvousTable()
        self._changed = threading.Condition()
        self.nodes: dict[int, NodeJoins] = {}
        self._links: dict[int, Connection] = {}
        self._ranks: dict[tuple[int, int], Connection] = {}
        self._refused = ""  # why a node cannot take part; the start fails
        self._stranger = ""  # the last peer that was turned away
        self._open = True
        keys = key, self.rendezvous_key
        self._listener = KeyedListener(listener, keys, self._serve, self._note_refused)

    # -- for the executor ---------------------------------------------------------------------
    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks of all nodes are connected. `check` is called now and then; its exceptions end the wait.

        Raises:
            StartupError: one is missing after that time, or differs from this machine.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._refused and (node := self._first_missing()) is not None:
                if (left := until - time.monotonic()) <= 0:
                    raise StartupError(self._missing(node, seconds))
                check()
                self._changed.wait(min(left, LOOK_AGAIN_S))
            if self._refused:
                raise StartupError(self._refused)

    def take(self, rank: int) -> tuple[Connection, RankOnNode]:
        """The connection to a rank, after `wait`. Raises StartupError: it is gone."""
        node = max(n for n, first in self.first_ranks.items() if first <= rank)
        with self._changed:
            found = self._ranks.pop((node, rank - self.first_ranks[node]), None)
            if found is None:
                raise StartupError(f"node {node} left before rank {rank} had started")
            return found, RankOnNode(found, f"node {node} ({self.nodes[node].host})")

    def close(self, ended: bool) -> None:
        """Close all connections. `ended`: the nodes leave too; else they connect to the next process of this engine."""
        self._open = False
        self._listener.close()
        with self._changed:
            for link in self._links.values():
                with suppress(OSError):
                    if ended:
                        link.send_bytes(encode(NodeEnds()))
                    _shut(link)
            for connection in self._ranks.values():
                connection.close()
            self._ranks.clear()

    def _first_missing(self) -> int | None:
        """The first node of which not all ranks are connected; None: there is none."""
        connected = Counter(node for node, _ in self._ranks)
        missing = (n for n, count in sorted(self.expected.items()) if connected[n] < count)
        return next(missing, None)

    def _missing(self, node: int, seconds: float) -> str:
        text = (
            f"node {node} has not come to {self.host}:{self.port} within {seconds:.0f} s: start it with the same command,"
            f" --node-rank {node} and --headless, and with a --master-addr that it can reach; while it still downloads or"
            " checks the model, raise QUIRE_NODES_TIMEOUT_S"
        )
        return f"{text} (last refused: {self._stranger})" if self._stranger else text

    # -- threads ------------------------------------------------------------------------------
    def _note_refused(self, where: str, why: Exception) -> None:
        self._stranger = f"{where}, {why}"

    def _serve(self, connection: Connection, number: int) -> None:
        """Handle one connection whose peer has proven a key."""
        if number == 1:
            self._table.serve(connection)
            return
        try:
            if not connection.poll(PROOF_S):
                raise EOFError
            message = decode(connection.recv_bytes(MAX_BYTES))
        except (EOFError, OSError, msgspec.MsgspecError) as why:
            log.warning("refused a node: no valid message came (%s)", why)
            connection.close()
            return
        if isinstance(message, RankJoins):
            self._add_rank(message, connection)
        elif isinstance(message, NodeJoins):
            self._serve_node(message, connection)
        else:
            connection.close()

    def _add_rank(self, message: RankJoins, connection: Connection) -> None:
        key = message.node, message.index
        with self._changed:
            is_expected = 0 <= message.index < self.expected.get(message.node, 0)
            if (
                not (is_expected and message.node in self._links and self._open)
                or key in self._ranks
            ):
                connection.close()
                return
            self._ranks[key] = connection
            self._changed.notify_all()

    def _serve_node(self, message: NodeJoins, link: Connection) -> None:
        """Accept or refuse a node, then wait until it leaves."""
        answer = self._answer(message, link)
        with suppress(EOFError, OSError), link:
            link.send_bytes(encode(answer))
            if isinstance(answer, NodeAccepted):
                log.info("node %d joins from %s", message.node, address_of(link, peer=True))
                link.recv_bytes(MAX_BYTES)  # nodes send nothing more: this ends with the connection
        with self._changed:
            if self._links.get(message.node) is link:
                del self._links[message.node]
                for index in range(message.num_ranks):
                    if (rank := self._ranks.pop((message.node, index), None)) is not None:
                        rank.close()
            self._changed.notify_all()

    def _answer(self, message: NodeJoins, link: Connection) -> NodeAccepted | NodeRefused:
        node, where = message.node, f"node {message.node} at {message.host}"
        with self._changed:
            if (count := self.expected.get(node)) is None:
                nodes = ", ".join(map(str, sorted(self.expected)))
                return NodeRefused(f"{where} is not expected here: --node-rank is one of {nodes}")
            if node in self._links:
                other = self.nodes[node].host
                return NodeRefused(
                    f"{where}: node {node} has already joined from {other}; give each node its own --node-rank"
                )
            text = differences(self._facts, message.facts)
            if not text and message.num_ranks != count:
                text = f"the number of its ranks is {message.num_ranks} there and {count} here"
            if text:
                self._refused = f"{where} differs from the head at {self.host}:{self.port}: {text}"
                self._changed.notify_all()
                return NodeRefused(self._refused)
            self.nodes[node], self._links[node] = message, link
            return NodeAccepted(self.first_ranks[node])


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Of the facts of two machines, with both values; "" if there are none."""
    found = [
        f"{name} is {there.get(name, 'not known')} there and {here.get(name, 'not known')} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
    return "; ".join(found[:MAX_DIFFERENCES]) + more


def _shut(connection: Connection) -> None:
    """Break a connection on which another thread waits."""
    with socket_of(connection) as end:
        end.shutdown(socket.SHUT_RDWR)
