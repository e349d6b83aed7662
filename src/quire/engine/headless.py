"""EngineNode: the engines of this machine for a server on another one (`quire serve --headless`).

It starts the engines as a server does, connects to the server's port, and passes messages on without decoding them. It ends
when the server says so, and when nothing has been heard from it for a while. Knows sockets, signals and states. Does not
know requests. `remote_engines.py` is the server's side.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec
import zmq

from quire.config.engine import Resolved
from quire.config.parallel.cluster_key import cluster_key
from quire.engine import remote_link as link
from quire.engine.engine_launcher import EnginePlace, close_all, supervise_local
from quire.engine.engine_sockets import EngineSockets
from quire.engine.engine_state import EngineState
from quire.errors import StartupError
from quire.logging import get_logger

log = get_logger(__name__)

LOOK_MS = 100


class LocalEngine:
    """One engine of this node, with the sockets of a frontend of it for each frontend of the server."""

    def __init__(self, rank: int, place: EnginePlace, frontends: int, context: zmq.Context[Any]):
        self.rank, self.place, self.frontends, self._context = rank, place, frontends, context
        self.last_state: EngineState | None = None
        """The state that the server knows."""
        self.epoch = 0
        self.sockets: list[EngineSockets] = []

    @property
    def state(self) -> EngineState:
        supervisor = self.place.supervisor
        return self.place.board.latest if supervisor is None else supervisor.state

    def follow(self) -> None:
        """Open the sockets of the engine's latest process."""
        if self.epoch != (epoch := self.state.epoch):
            self.close()
            folder = self.place.folder / str(epoch)
            self.sockets = [
                EngineSockets(self._context, folder, client) for client in range(self.frontends)
            ]
            self.epoch = epoch

    def close(self) -> None:
        for sockets in self.sockets:
            sockets.close()
        self.sockets = []


class EngineNode:
    """Runs the engines of `resolved.config.parallel.ranks` for a server.

    Raises:
        ConfigError: there is no key for the server's address.
    """

    def __init__(self, resolved: Resolved):
        self.resolved, parallel = resolved, resolved.config.parallel
        self.ranks, self.where = parallel.ranks, link.endpoint(parallel)
        self.stopped = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._server = self._context.socket(zmq.DEALER)
        link.secured(
            self._server, cluster_key(parallel.data_parallel_address or link.LOCAL), is_server=False
        )
        self._server.connect(self.where)
        self._heard = time.monotonic()
        self.engines: list[LocalEngine] = []

    def run(self) -> int:
        """Serve until a signal, or until the server is gone; the exit status.

        Raises:
            StartupError: no server answers at that address, or it refuses these engines.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        places: Sequence[EnginePlace] = ()
        try:
            if (frontends := self._meet()) is None:
                return 0
            places = supervise_local(self.resolved, frontends)
            self.engines = [
                LocalEngine(rank, place, frontends, self._context)
                for rank, place in zip(self.ranks, places, strict=True)
            ]
            return self._serve()
        finally:
            self._send(link.control(link.Farewell()))
            close_all(places)
            for engine in self.engines:
                engine.close()
            self._context.destroy(linger=500)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        log.info("%s: shutting down", signal.Signals(number).name)
        self.stopped.set()

    def _send(self, frames: list[Any]) -> None:
        self._server.send_multipart(frames)

    def _meet(self) -> int | None:
        """Offer the engines until the server takes them; the number of its frontends. None: a stop signal came."""
        hello = link.control(link.Hello(list(self.ranks), link.facts_of(self.resolved)))
        began, last_hello = time.monotonic(), 0.0
        while not self.stopped.is_set():
            if (now := time.monotonic()) - began > link.MEET_S:
                raise StartupError(
                    f"no server answered at {self.where} within {link.MEET_S:.0f} s (data_parallel_address,"
                    " data_parallel_rpc_port): check that it runs there, that the port is open, and that"
                    " QUIRE_CLUSTER_KEY_FILE has the same content on both machines"
                )
            if now - last_hello > link.BEAT_S:
                last_hello = now
                self._send(hello)
            for message in self._receive():
                if isinstance(message, link.Welcome):
                    self._heard = time.monotonic()
                    log.info("the server at %s takes the engines %s", self.where, list(self.ranks))
                    return message.frontends
                if isinstance(message, link.Refusal):
                    raise StartupError(f"the server at {self.where} refuses the engines of this node: {message.reason}")  # fmt: skip
        return None

    def _receive(self) -> list[Any]:
        """What the server sent, after at most LOOK_MS."""
        self._server.poll(LOOK_MS)
        return [link.read(frames) for frames in link.waiting(self._server)]

    def _serve(self) -> int:
        beaten = 0.0
        while not self.stopped.is_set():
            now = time.monotonic()
            if now - self._heard > link.GONE_S:
                log.error("nothing was heard from the server at %s for %.0f s: this node ends", self.where, link.GONE_S)  # fmt: skip
                return 1
            if now - beaten >= link.BEAT_S:
                beaten = now
                self._send(link.control(link.LinkBeat()))
            for engine in self.engines:
                self._report(engine)
                if engine.state.condition == "dead":
                    log.error("engine %d has stopped: %s", engine.rank, engine.state.error)
                    return 1
            if (code := self._pass_on()) is not None:
                return code
        return 0

    def _report(self, engine: LocalEngine) -> None:
        """Tell the server a new state, once the sockets of the engine's process are open."""
        state = engine.state
        if engine.epoch != state.epoch:
            engine.follow()
        if state is not engine.last_state:
            engine.last_state = state
            self._send(link.control(link.NodeState(engine.rank, state)))

    def _pass_on(self) -> int | None:
        ups = [
            (engine, client, sockets.up)
            for engine in self.engines
            for client, sockets in enumerate(engine.sockets)
        ]
        ready = link.ready([self._server, *(socket for _, _, socket in ups)], LOOK_MS)
        for engine, client, socket in ups:
            head = link.DataHead(engine.rank, engine.epoch, client)
            for frames in link.waiting(socket) if socket in ready else ():
                self._send(link.data(head, frames))
        if self._server not in ready:
            return None
        for message in self._receive():
            self._heard = time.monotonic()
            if isinstance(message, link.Farewell):
                log.info("the server at %s has ended: this node ends too", self.where)
                return 0
            if isinstance(message, tuple):
                self._deliver(*message)
        return None

    def _deliver(self, head: link.DataHead, frames: list[bytes]) -> None:
        for engine in self.engines:
            if engine.rank == head.rank and engine.epoch == head.epoch and engine.sockets:
                engine.sockets[0].down.send(frames[0])


def serve_engines(resolved: Resolved) -> int:
    """As `EngineNode.run`. A stranger's bytes at the server's address end it with an error."""
    node = EngineNode(resolved)
    try:
        return node.run()
    except (msgspec.MsgspecError, IndexError) as why:
        raise StartupError(f"{node.where} is no server of this version of Quire: {why}") from None
