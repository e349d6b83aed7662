"""RemoteEngines with a node that is the test: who may join, what passes through, and what follows a loss."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from quire.config.parallel.cluster_key import cluster_key
from quire.config.parallel.parallel_config import ParallelConfig
from quire.engine import remote_engines
from quire.engine import remote_link as link
from quire.engine.engine_sockets import EngineSockets
from quire.engine.engine_state import EngineState
from quire.engine.remote_engines import RemoteEngines
from quire.errors import ConfigError
from quire.protocol.output import EngineReady

FACTS = {"version": "1", "checkpoint": "abc"}
READY = EngineReady(64, 100, 16, 97, "float32", "cpu", "Toy", "native", 1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(link, "facts_of", lambda resolved: FACTS)
    monkeypatch.setattr(link, "GONE_S", 600.0)  # the nodes here send no heartbeats
    parallel = ParallelConfig(
        data_parallel_size=3, data_parallel_size_local=1, data_parallel_rpc_port=free_port()
    )
    return SimpleNamespace(config=SimpleNamespace(parallel=parallel))


@pytest.fixture
def remote(resolved: Any) -> Iterator[RemoteEngines]:
    made = RemoteEngines(resolved, range(1, 3), frontends=1)
    yield made
    for engine in made.engines.values():
        engine.stop()
    for engine in made.engines.values():
        engine.close(60)
        assert not engine.folder.exists()


class Node:
    def __init__(self, where: str, secret: bytes | None = None):
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        key = cluster_key("127.0.0.1") if secret is None else secret
        link.secured(self.socket, key, is_server=False)
        self.socket.connect(where)

    def say(self, message: Any) -> None:
        self.socket.send_multipart(link.control(message))

    def hear(self, kind: type[Any], seconds: float = 60.0) -> Any:
        """The next message of this kind."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.socket.poll(100):
                found = link.read(self.socket.recv_multipart())
                if isinstance(found, kind):
                    return found
        return None

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def node(remote: RemoteEngines) -> Iterator[Node]:
    made = Node(remote.where)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_a_node_joins_and_messages_pass_both_ways(remote: RemoteEngines, node: Node) -> None:
    engine = remote.engines[2]
    assert "waiting for a node with engine 2 at tcp://127.0.0.1:" in str(engine.state.startup)
    node.say(link.Hello([1, 2], FACTS))
    assert node.hear(link.Welcome).frontends == 1
    node.say(link.NodeState(2, EngineState(1, "ready", READY)))
    until(lambda: engine.state.condition == "ready")
    front = EngineSockets(node.context, engine.folder / "1", 0)
    front.down.send(b"request")
    head, frames = node.hear(tuple)
    assert (head, frames) == (link.DataHead(2, 1), [b"request"])
    node.socket.send_multipart(link.data(link.DataHead(2, 1), [b"out", b"put"]))
    assert front.up.poll(60_000)
    assert front.up.recv_multipart() == [b"out", b"put"]
    # Bytes from a stranger, or from an engine of another node, change nothing.
    node.socket.send_multipart([b"", b"\xc1"])
    node.socket.send_multipart([b"nonsense"])
    node.socket.send_multipart(link.data(link.DataHead(2, 1), []))
    node.socket.send_multipart(link.data(link.DataHead(2, 1, client=9), [b"output"]))
    node.say(link.NodeState(7, EngineState(1, "dead")))
    node.say(link.NodeState(2, EngineState(2, "restarting", incident="x")))
    until(lambda: engine.state.epoch == 2)
    assert (engine.folder / "2" / "down").exists()
    assert len(engine.sockets.up) == 1
    front.close()


def test_a_node_that_leaves_may_come_again(remote: RemoteEngines, node: Node) -> None:
    engine = remote.engines[1]
    node.say(link.Hello([1], FACTS))
    node.say(link.NodeState(1, EngineState(1, "ready", READY)))
    until(lambda: engine.state.condition == "ready")
    node.say(link.Farewell())
    until(lambda: engine.state.condition == "delayed")
    assert engine.state.error == "its node was stopped"
    again = Node(remote.where)
    again.say(link.Hello([1], FACTS))
    until(lambda: (engine.state.epoch, engine.state.condition) == (2, "restarting"))
    again.say(link.NodeState(1, EngineState(1, "ready", READY)))
    until(lambda: (engine.state.epoch, engine.state.condition) == (2, "ready"))
    again.close()


def test_a_node_that_leaves_while_its_engine_restarts_may_come_again(
    remote: RemoteEngines,
) -> None:
    """Regression: the engine stayed "restarting" for ever, and requests waited for it; or it was given up."""
    engine = remote.engines[1]
    ready, restarts = EngineState(1, "ready", READY), EngineState(2, "restarting")
    starts, fails = EngineState(1, "starting"), EngineState(1, "dead", error="no memory")
    for epoch, states in ((2, (ready, restarts)), (3, (starts,)), (4, (fails,))):
        own = Node(remote.where)
        own.say(link.Hello([1], FACTS))
        for state in states:
            own.say(link.NodeState(1, state))
        own.say(link.Farewell())
        until(
            lambda epoch=epoch: (engine.state.epoch, engine.state.condition) == (epoch, "delayed")
        )
        own.close()
        remote._until = 0.0  # the time in which all nodes must have come is over
    assert engine.state.error == "no memory"


def test_a_silent_node_is_lost(
    remote: RemoteEngines, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.say(link.Hello([1], FACTS))
    node.say(link.NodeState(1, EngineState(1, "ready", READY)))
    until(lambda: remote.engines[1].state.condition == "ready")
    monkeypatch.setattr(link, "GONE_S", 0.0)
    until(lambda: remote.engines[1].state.condition == "delayed")
    assert "no message from its node" in remote.engines[1].state.error


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (link.Hello([1], FACTS | {"version": "2"}), "version is 2 there and 1 here"),
        (link.Hello([0], FACTS), "waits for the engines [1, 2], and the node has [0]"),
    ],
)
def test_a_node_that_differs_is_refused(
    remote: RemoteEngines, node: Node, hello: link.Hello, why: str
) -> None:
    node.say(hello)
    assert why in node.hear(link.Refusal).reason


def test_an_engine_belongs_to_one_node(remote: RemoteEngines, node: Node) -> None:
    node.say(link.Hello([1], FACTS))
    assert node.hear(link.Welcome)
    other = Node(remote.where)
    other.say(link.Hello([1, 2], FACTS))
    assert "another node has the engines [1]" in other.hear(link.Refusal).reason
    other.close()


def test_a_node_that_never_comes_ends_the_start(
    remote: RemoteEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote._until = 0.0
    until(lambda: remote.engines[1].state.condition == "dead")
    error = remote.engines[1].state.error
    assert f"no node offered engine 1 at {remote.where} within 60 s" in error
    assert "--headless --data-parallel-start-rank 1" in error


def test_a_peer_without_the_key_is_not_heard(
    resolved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    monkeypatch.setenv("QUIRE_CLUSTER_KEY_FILE", str(key))
    made = RemoteEngines(resolved, range(1, 2), frontends=1)
    good = Node(made.where, b"0123456789abcdef")
    strangers = [Node(made.where, b"loopback"), Node(made.where, b"another key that is long")]
    for one in strangers:
        one.say(link.Hello([1], FACTS))
    assert [one.hear(link.Welcome, 0.5) for one in strangers] == [None, None]
    good.say(link.Hello([1], FACTS))
    assert good.hear(link.Welcome)
    for one in (good, *strangers):
        one.close()
    made.engines[1].close(60)


def test_another_user_of_the_machine_is_not_heard(remote: RemoteEngines) -> None:
    """On a loopback address without a key file; a refusal would tell the stranger the configuration."""
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(remote.where)
    for facts in ({}, FACTS):
        stranger.send_multipart(link.control(link.Hello([1, 2], facts)))
    assert not stranger.poll(1000)
    assert all(engine.node is None for engine in remote.engines.values())
    context.destroy(linger=0)


def test_a_port_that_is_in_use_is_named(remote: RemoteEngines, resolved: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{remote.where} cannot be bound: Address already in use",
    ):
        remote_engines.RemoteEngines(resolved, range(1, 2), frontends=1)


def test_another_address_needs_a_key(resolved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CLUSTER_KEY_FILE", raising=False)
    resolved.config.parallel = ParallelConfig(
        data_parallel_size=2, data_parallel_address="10.0.0.1"
    )
    with pytest.raises(ConfigError, match="QUIRE_CLUSTER_KEY_FILE"):
        RemoteEngines(resolved, range(1, 2), frontends=1)
