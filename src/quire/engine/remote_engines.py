"""RemoteEngines: engines on other machines, as if their processes were children of this one.

    frontends -- sockets of a local engine --> this thread <-- TCP, one port (`remote_link.py`) --> nodes (`headless.py`)

It publishes the state that a node sends on a board, and passes messages on without decoding them. So frontends cannot tell
a remote engine from a local one. A node that goes away is an engine that died: its requests go to the others, and the
number of the engine's process grows when a node offers the engine again. Knows sockets and states. Does not know requests.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from quire.config.engine import Resolved
from quire.config.parallel.cluster_key import cluster_key
from quire.engine import remote_link as link
from quire.engine.engine_sockets import FrontendSockets
from quire.engine.engine_state import EngineState, StateBoard
from quire.errors import ConfigError
from quire.executor.control_port import differences
from quire.logging import get_logger
from quire.processes.port_holder import port_holder
from quire.processes.run_folder import hold, own_folder
from quire.protocol.output import StartupStatus

log = get_logger(__name__)

LOOK_MS = 200


class RemoteEngine:
    """One engine at a node: its board and its folder of sockets here, with the methods of an EngineSupervisor that clients call."""

    def __init__(self, rank: int, context: zmq.Context[Any], where: str, frontends: int):
        self.rank, self._context, self._frontends = rank, context, frontends
        self.folder, self.board = own_folder(), StateBoard()
        self._lock = hold(self.folder)
        self.node: bytes | None = None
        """The identity of its node; None: it has none now."""
        self.base = 0
        """Added to the number of its process at the node, it is the number of its process here."""
        self.was_ready = False
        waiting = StartupStatus(f"waiting for a node with engine {rank} at {where}")
        self.board.publish(EngineState(1, "starting", startup=waiting))
        self.closing, self.removed = threading.Event(), threading.Event()
        self.sockets = FrontendSockets(context, self.folder / "1", frontends)

    @property
    def state(self) -> EngineState:
        return self.board.latest

    def stop(self) -> None:
        self.closing.set()

    def close(self, seconds: float = 5.0) -> None:
        """Wait until the nodes know that the server ends; all engines must be stopped first."""
        self.stop()
        self.removed.wait(seconds)

    # -- for the thread
    def follow(self, epoch: int) -> None:
        """The engine has another process: open sockets of its own for it."""
        self.sockets.close()
        self.sockets = FrontendSockets(self._context, self.folder / str(epoch), self._frontends)

    def lose(self, why: str) -> None:
        """Its node is gone."""
        self.node = None
        if self.state.condition in ("dead", "closed"):
            return
        incident = secrets.token_hex(4)
        log.error("failure %s of engine %d: %s", incident, self.rank, why)
        if not self.was_ready:  # the server still starts: another node may offer it
            return
        self.board.publish(EngineState(self.state.epoch, "delayed", self.state.ready, why, incident=incident))  # fmt: skip

    def remove(self) -> None:
        self.sockets.close()
        if self.state.condition != "dead":
            self.board.publish(EngineState(self.state.epoch, "closed"))
        self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        self.removed.set()


class RemoteEngines:
    """Listens for nodes, and keeps the engines of `ranks`.

    Raises:
        ConfigError: the address cannot be used, or there is no key for it.
    """

    def __init__(self, resolved: Resolved, ranks: range, frontends: int):
        parallel = resolved.config.parallel
        self._frontends, self._facts = frontends, link.facts_of(resolved)
        self.where = link.endpoint(parallel)
        secret = cluster_key(parallel.data_parallel_address or link.LOCAL)
        self._context: zmq.Context[Any] = zmq.Context()
        self._keys: ThreadAuthenticator | None = None
        if secret:
            self._keys = ThreadAuthenticator(self._context)
            self._keys.start()
            self._keys.configure_curve_callback(domain="*", credentials_provider=link.NodeKeys(secret))  # fmt: skip
        self._router = self._context.socket(zmq.ROUTER)
        link.secured(self._router, secret, is_server=True)
        try:
            self._router.bind(self.where)
        except zmq.ZMQError as why:
            self._end_context()
            what = os.strerror(why.errno or 0) + port_holder(parallel.data_parallel_rpc_port)
            raise ConfigError(
                f"data_parallel_address, data_parallel_rpc_port: {self.where} cannot be bound: {what}; choose an"
                " address of this machine and a free port"
            ) from None
        self.engines = {
            rank: RemoteEngine(rank, self._context, self.where, frontends) for rank in ranks
        }
        self._heard: dict[bytes, float] = {}
        """When each node sent something last."""
        self._until = time.monotonic() + link.MEET_S
        threading.Thread(target=self._run, name="remote-engines", daemon=True).start()

    def _end_context(self) -> None:
        if self._keys is not None:
            self._keys.stop()
        self._context.destroy(linger=500)

    # -- the thread -------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            beaten = 0.0
            while not all(engine.closing.is_set() for engine in self.engines.values()):
                self._pass_on()
                if (now := time.monotonic()) - beaten >= link.BEAT_S:
                    beaten = now
                    self._look(now)
            for node in self._heard:
                self._send(node, link.control(link.Farewell()))
        except Exception:
            log.exception("the connection to engines on other machines failed")
        finally:
            for engine in self.engines.values():
                engine.remove()
            self._end_context()

    def _pass_on(self) -> None:
        with_node = [engine for engine in self.engines.values() if engine.node is not None]
        downs = (engine.sockets.down for engine in with_node)
        ready = link.ready([self._router, *downs], LOOK_MS)
        if self._router in ready:
            for frames in link.waiting(self._router):
                self._from_node(frames[0], frames[1:])
        for engine in self.engines.values():
            if engine.node is None or engine.sockets.down not in ready:
                continue
            head = link.DataHead(engine.rank, engine.state.epoch - engine.base)
            for frames in link.waiting(engine.sockets.down):
                self._send(engine.node, link.data(head, frames))

    def _send(self, node: bytes, frames: list[Any]) -> None:
        self._router.send_multipart([node, *frames])

    def _from_node(self, node: bytes, frames: list[bytes]) -> None:
        try:
            message = link.read(frames)
        except (msgspec.MsgspecError, IndexError):
            log.warning_every("stranger", 60.0, "a peer at %s sent something else than an engine's node; ignored", self.where)  # fmt: skip
            return
        if isinstance(message, link.Hello):
            self._meet(node, message)
        elif node in self._heard:
            self._heard[node] = time.monotonic()
            self._handle(node, message)

    def _handle(self, node: bytes, message: link.LinkMessage | tuple[link.DataHead, list[bytes]]) -> None:  # fmt: skip
        match message:
            case (link.DataHead(rank=rank, epoch=epoch, client=client), frames):
                engine, is_known = self.engines.get(rank), 0 <= client < self._frontends
                if engine is not None and engine.node == node and is_known and epoch + engine.base == engine.state.epoch:  # fmt: skip
                    engine.sockets.up[client].send_multipart(frames)
            case link.NodeState(rank=rank, state=state):
                engine = self.engines.get(rank)
                if engine is not None and engine.node == node:
                    self._follow(engine, state)
            case link.Farewell():
                self._lose(node, "its node was stopped")

    def _follow(self, engine: RemoteEngine, state: EngineState) -> None:
        if state.condition == "closed":
            return
        if (
            state.condition == "dead" and engine.base
        ):  # it did not start there; another node may offer it
            engine.lose(state.error)
            return
        engine.was_ready |= state.condition == "ready"
        found = msgspec.structs.replace(state, epoch=state.epoch + engine.base)
        if found.epoch != engine.state.epoch:
            engine.follow(found.epoch)
        engine.board.publish(found)

    def _meet(self, node: bytes, hello: link.Hello) -> None:
        if why := self._refusal(node, hello):
            log.error("a node with the engines %s was refused: %s", hello.ranks, why)
            self._send(node, link.control(link.Refusal(why)))
            return
        if node not in self._heard:
            log.info("a node offers the engines %s", hello.ranks)
            for rank in hello.ranks:
                self._join(self.engines[rank], node)
        self._heard[node] = time.monotonic()
        self._send(node, link.control(link.Welcome(self._frontends)))

    def _refusal(self, node: bytes, hello: link.Hello) -> str:
        """Why these engines are refused; "" if they are not."""
        if found := differences(self._facts, hello.facts):
            return f"the node differs from the server at {self.where}: {found}"
        if unknown := [rank for rank in hello.ranks if rank not in self.engines]:
            return f"this server waits for the engines {list(self.engines)}, and the node has {unknown}"
        conflicts = [rank for rank in hello.ranks if self.engines[rank].node not in (None, node)]
        return f"another node has the engines {conflicts}" if conflicts else ""

    def _join(self, engine: RemoteEngine, node: bytes) -> None:
        before, engine.node = engine.state, node
        if not engine.was_ready:
            return
        engine.base = before.epoch
        self._follow(engine, EngineState(1, "restarting", incident=before.incident))

    def _lose(self, node: bytes, why: str) -> None:
        self._heard.pop(node, None)
        for engine in self.engines.values():
            if engine.node == node:
                engine.lose(why)

    def _look(self, now: float) -> None:
        """Beat, and give up on nodes that are silent or never came."""
        for node, heard in list(self._heard.items()):
            if now - heard > link.GONE_S:
                self._lose(node, f"no message from its node for {link.GONE_S:.0f} s")
            else:
                self._send(node, link.control(link.LinkBeat()))
        for engine in self.engines.values():
            missing = engine.node is None and engine.state.condition == "starting"
            if missing and now > self._until:
                engine.board.publish(EngineState(1, "dead", error=(
                    f"no node offered engine {engine.rank} at {self.where} within {link.MEET_S:.0f} s: start `quire serve"
                    f" MODEL --headless --data-parallel-start-rank {engine.rank}` there, with this address and port"
                )))  # fmt: skip
