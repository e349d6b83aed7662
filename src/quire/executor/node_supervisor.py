"""NodeSupervisor: the ranks of this machine, for an engine whose head is on another one.

Knows the head's control port, its own worker processes and their end. Does not know what they compute: the head sends that
to each of them over a connection of its own. No torch here.

    run: connect, join -> start a process for each rank -> until the head ends (return) or its connection breaks (again)
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from multiprocessing.connection import Connection

import msgspec

from quire.errors import StartupError, Unsupported
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
from quire.executor.rank_process import start_worker
from quire.logging import get_logger
from quire.processes.child import StopCounter, how_it_ended, wait_or_kill
from quire.processes.keyed_socket import address_of, connect

log = get_logger(__name__)

LOOK_EVERY_S = 1.0
END_S = 5.0  # how long a rank's process may take to end after its connection is closed


class NodeSupervisor:
    """Runs `num_ranks` ranks of an engine.

    Args:
        head: host and port of the head's control port.
        key: of the cluster.
        number: of this node, from 0.
        memory_bytes: of the memory that its ranks share.
        facts, paths: of this machine (`NodeJoins`).
        host: address at which other ranks reach this machine; empty: the one from which it reaches the head.
        seconds: how long it waits for a head, and for the next one when a head is gone.
        follows: whether it waits for a next one at all.
    """

    def __init__(
        self,
        head: tuple[str, int],
        key: bytes,
        number: int,
        num_ranks: int,
        memory_bytes: int,
        facts: Mapping[str, str],
        paths: Mapping[str, str],
        host: str = "",
        seconds: float = 50.0,
        follows: bool = True,
    ):
        if not hasattr(os, "memfd_create"):
            raise Unsupported("ranks on this operating system", "use Linux")
        self.head, self.number, self.num_ranks = head, number, num_ranks
        self._key, self._memory_bytes, self._host, self._seconds = key, memory_bytes, host, seconds
        self._facts, self._paths, self._follows = dict(facts), dict(paths), follows

    @property
    def where(self) -> str:
        return f"the head at {self.head[0]}:{self.head[1]}"

    def run(self) -> None:
        """Serve until the head was stopped.

        Raises:
            StartupError: no head answers, or it refuses this node; or it is gone, and no next process of it answers.
        """
        link = connect(*self.head, self._key, self._seconds)
        while not self._serve(link):
            if not self._follows:
                raise StartupError(f"{self.where} is gone, so this node ends")
            log.warning(
                "%s is gone: waiting %.0f s for the next process of its engine",
                self.where,
                self._seconds,
            )
            try:
                link = connect(*self.head, self._key, self._seconds)
            except StartupError as why:
                raise StartupError(f"{self.where} is gone, so this node ends: {why}") from None
        log.info("%s was stopped, so this node ends", self.where)

    def _serve(self, link: Connection) -> bool:
        """Run the ranks of one process of the head's engine. Returns whether the head was stopped."""
        children: list[subprocess.Popen[bytes]] = []
        memory, stopped = os.memfd_create("quire-ranks", 0), False
        try:
            os.ftruncate(memory, self._memory_bytes)
            self._join(link, memory)
            for index in range(self.num_ranks):
                children.append(self._start(index, memory))
            self._watch(link, children)
            stopped = isinstance(decode(link.recv_bytes(MAX_BYTES)), NodeEnds)
            return stopped
        except (EOFError, OSError, msgspec.MsgspecError):
            return False
        finally:
            link.close()
            os.close(memory)
            for child in children:
                wait_or_kill(child, END_S if stopped else 0.0)

    def _join(self, link: Connection, memory: int) -> None:
        """Raises StartupError: the head refuses this node. EOFError, OSError: the head is gone."""
        host = self._host or address_of(link)
        link.send_bytes(
            encode(
                NodeJoins(
                    self.number, self.num_ranks, memory, host, self.head, self._facts, self._paths
                )
            )
        )
        if not link.poll(self._seconds):
            raise StartupError(f"{self.where} did not answer within {self._seconds:.0f} s")
        answer = decode(link.recv_bytes(MAX_BYTES))
        if isinstance(answer, NodeRefused):
            raise StartupError(answer.text)
        if isinstance(answer, NodeAccepted):
            last = answer.first_rank + self.num_ranks - 1
            log.info(
                "node %d at %s joined %s: ranks %d to %d",
                self.number, host, self.where, answer.first_rank, last,
            )  # fmt: skip

    def _start(self, index: int, memory: int) -> subprocess.Popen[bytes]:
        """Start a rank's process on a connection to the head. Raises OSError, StartupError."""
        connection = connect(*self.head, self._key, self._seconds)
        with connection:  # the process has a copy; it ends when the head closes the other end
            connection.send_bytes(encode(RankJoins(self.number, index)))
            return start_worker(connection, [memory])

    def _watch(self, link: Connection, children: list[subprocess.Popen[bytes]]) -> None:
        """Wait until the head sends a message or is gone. End each process that was stopped, and log each that ends."""
        running = {number: StopCounter(child.pid) for number, child in enumerate(children)}
        while not link.poll(LOOK_EVERY_S):
            for number, stops in list(running.items()):
                child = children[number]
                if stops.look():
                    log.error("the process of rank %d of this node was stopped (SIGSTOP, or a debugger), so it is ended", number)  # fmt: skip
                    child.kill()
                if child.poll() is not None:
                    del running[number]
                    log.error("the process of rank %d of this node %s", number, how_it_ended(child))
