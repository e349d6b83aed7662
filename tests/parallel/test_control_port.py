"""The head's control port and its nodes: who may join, what must be equal, and who notices whose end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from quire.errors import EngineDeadError, StartupError
from quire.executor.control_port import ControlPort
from quire.executor.multiproc_executor import MultiprocExecutor
from quire.executor.node_messages import NodeEnds, encode
from quire.executor.node_supervisor import NodeSupervisor
from quire.parallel.multi_node import Machines
from quire.processes import keyed_listener
from quire.processes.keyed_socket import connect, listen, prove

KEY = b"k" * 32
FACTS = {"the version of Quire": "1", "QUIRE_CPU_ISA": "avx2", "the checkpoint (digest)": "abc"}
LIMIT_S = 60


class Functions:
    """A worker without a model."""

    def __init__(self, payload: bytes):
        self.functions = {
            "payload": lambda: payload,
            "pid": os.getpid,
            "leave": lambda code: os._exit(code),
        }

    def call(self, name: str, *args: Any) -> Any:
        return self.functions[name](*args)


def worker(payload: bytes, report: Any) -> Functions:
    return Functions(payload)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def port() -> Iterator[ControlPort]:
    found = ControlPort("127.0.0.1", 0, KEY, FACTS, {1: 1})
    yield found
    found.close(ended=True)


def node(
    port: ControlPort, number: int = 1, ranks: int = 1, seconds: float = 20, **changes: Any
) -> NodeSupervisor:
    facts = FACTS | changes.pop("facts", {})
    options = {"key": KEY, "host": "127.0.0.2", **changes}
    key = options.pop("key")
    return NodeSupervisor(
        (port.host, port.port), key, number, ranks, 4096, facts, {}, seconds=seconds, **options
    )


def group_of(port: ControlPort) -> MultiprocExecutor:
    port.wait(LIMIT_S)
    starts = [partial(port.take, rank) for rank in range(port.expected[1])]
    payloads = [b"a", b"b"][: len(starts)]
    return MultiprocExecutor("test_control_port:worker", payloads, starts, on_end=port.close)


def ends(run: Future[None]) -> str:
    """The error with which a node ends."""
    return str(run.exception(LIMIT_S))


def gone(pid: int) -> bool:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_the_ranks_of_a_node_are_members_of_the_group(threads):
    port = ControlPort("127.0.0.1", 0, KEY, FACTS, {1: 2})
    run = threads.submit(node(port, ranks=2).run)
    group = group_of(port)
    assert group.call("payload") == [b"a", b"b"]
    pids = group.call("pid")
    assert group.lost() == ""
    group.close()
    run.result(LIMIT_S)  # the node ends without an error
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("exit", marks=pytest.mark.slow),
        pytest.param("kill", marks=pytest.mark.slow),
        pytest.param("kill while nothing is asked", marks=pytest.mark.slow),
        "stop",
    ],
)
def test_a_rank_that_ends_ends_all_and_the_node_joins_the_next_process(threads, port, how):
    run = threads.submit(node(port).run)
    group = group_of(port)
    pids = group.call("pid")
    if how == "stop":  # as the supervisor does with an engine that hangs
        os.kill(pids[0], signal.SIGSTOP)
        group.fail(EngineDeadError("hung"))
    elif how == "kill while nothing is asked":
        os.kill(pids[0], signal.SIGKILL)
        while not group.lost():
            time.sleep(0.01)
        group.close()
    else:
        if how == "kill":
            os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"on node 1 \(127\.0\.0\.2\) has ended"):
            group.call("leave", 3)
    assert all(gone(pid) for pid in pids)
    assert group.lost().startswith("rank 0: the worker's process on node 1 (127.0.0.2) has ended")
    following = ControlPort(port.host, port.port, KEY, FACTS, {1: 1})
    second = group_of(following)
    assert set(second.call("pid")).isdisjoint(pids)
    second.close()
    run.result(LIMIT_S)


def test_a_node_leaves_when_its_head_is_gone(threads, port):
    run = threads.submit(node(port, seconds=1).run)
    group = group_of(port)
    pids = group.call("pid")
    port.close(ended=False)  # as the kernel does with the sockets of a killed process
    for member in group.members:
        member.process.kill()
    assert "the head at 127.0.0.1" in ends(run)
    assert "is gone, so this node ends: could not connect" in ends(run)
    assert all(gone(pid) for pid in pids)


def test_a_node_ends_a_stopped_rank(threads, port, monkeypatch):
    """The head sees only a connection, which stays whole."""
    monkeypatch.setattr("quire.processes.child.STOPPED_LOOKS", 1)
    run = threads.submit(node(port, follows=False).run)
    group = group_of(port)
    (pid,) = group.call("pid")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"on node 1 \(127\.0\.0\.2\) has ended"):
        group.call("payload")
    assert gone(pid)
    assert "is gone, so this node ends" in ends(run)


def test_what_differs_is_named_with_both_values_on_both_sides(threads, port):
    other = {"QUIRE_CPU_ISA": "avx512", "the checkpoint (digest)": "abd"}
    run = threads.submit(node(port, facts=other).run)
    wanted = (
        f"node 1 at 127.0.0.2 differs from the head at 127.0.0.1:{port.port}: QUIRE_CPU_ISA is avx512 there and avx2 here;"
        " the checkpoint (digest) is abd there and abc here"
    )
    with pytest.raises(StartupError) as caught:
        port.wait(LIMIT_S)
    assert str(caught.value) == ends(run) == wanted


def test_a_missing_node_is_named_with_the_address_and_who_else_came(threads, port):
    with pytest.raises(StartupError, match=r"has another key"):
        node(port, key=b"o" * 32).run()
    while not port._stranger:
        time.sleep(0.01)
    with pytest.raises(StartupError) as caught:
        port.wait(0.3)
    text = str(caught.value)
    assert f"node 1 has not come to 127.0.0.1:{port.port} within 0 s" in text
    assert "--node-rank 1" in text
    assert "last refused: 127.0.0.1, it has another key" in text


def test_two_nodes_of_one_number(threads, port):
    first = threads.submit(node(port).run)
    port.wait(LIMIT_S)
    with pytest.raises(StartupError, match=r"node 1 has already joined from 127\.0\.0\.2"):
        node(port, host="127.0.0.3").run()
    with pytest.raises(
        StartupError, match=r"node 7 at 127.0.0.2 is not expected here: .* one of 1"
    ):
        node(port, number=7).run()
    port.close(ended=True)
    first.result(LIMIT_S)


def test_another_number_of_ranks_is_refused(threads, port):
    run = threads.submit(node(port, ranks=3).run)
    with pytest.raises(StartupError, match=r"the number of its ranks is 3 there and 1 here"):
        port.wait(LIMIT_S)
    assert "the number of its ranks" in ends(run)


def test_strangers_and_invalid_messages_change_nothing(threads, port):
    with socket.create_connection((port.host, port.port)) as stranger:
        stranger.sendall(os.urandom(1 << 16))
    for data in (b"", b"\xc1", os.urandom(100), encode(NodeEnds())):
        with connect(port.host, port.port, KEY, 10) as member:
            member.send_bytes(data)
            with pytest.raises((EOFError, OSError)):
                member.recv_bytes()
    run = threads.submit(node(port).run)
    group = group_of(port)
    assert group.call("payload") == [b"a"]
    group.close()
    run.result(LIMIT_S)


def test_silent_peers_keep_no_node_out(port):
    """Regression: 32 silent peers took all places for 5 s, again and again."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((port.host, port.port)))
        with connect(port.host, port.port, KEY, 3):
            pass


def test_silent_peers_of_another_address_drop_nobody_else(port):
    """A slow peer keeps its place, whatever others do."""
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection((port.host, port.port), source_address=("127.0.0.9", 0)))  # fmt: skip
        for _ in range(100):
            stack.enter_context(socket.create_connection((port.host, port.port)))
        time.sleep(0.2)
        prove(slow, KEY).close()


def test_refused_connections_are_few_lines(port, caplog, monkeypatch):
    """Regression: each was a line of the log."""
    monkeypatch.setattr(keyed_listener.log, "_last", {})
    for _ in range(50):
        with socket.create_connection((port.host, port.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
    refused = [record for record in caplog.records if "refused a connection" in record.message]
    assert 1 <= len(refused) <= 2


def test_silent_peers_keep_no_rank_out(threads):
    """Regression: a rank that waits for another looked at one silent peer after the other, for 5 s each."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(address))
        server = threads.submit(Machines([0, 1], "127.0.0.1", key=KEY)._accepted, "x", listener)
        with connect(*address, KEY, 3) as client:
            os.close(server.result(LIMIT_S))
            assert client.poll(LIMIT_S)  # its end is closed
    listener.close()


class Proxy:
    """Forwards connections to a port, each piece later by `delay` seconds; `cut` breaks all of them."""

    def __init__(self, to: tuple[str, int], delay: float):
        self._to, self._delay = to, delay
        self.listener = socket.create_server(("127.0.0.3", 0))
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            self._ends.append(near)
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            self._ends.append(far)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(self._delay)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_slow_network_and_its_loss(threads, port):
    proxy = Proxy((port.host, port.port), delay=0.05)
    options = {"facts": dict(FACTS), "paths": {}, "host": "127.0.0.2", "seconds": 3}
    far = NodeSupervisor(proxy.listener.getsockname()[:2], KEY, 1, 1, 4096, **options)
    run = threads.submit(far.run)
    group = group_of(port)
    assert group.call("payload") == [b"a"]
    proxy.cut()
    with pytest.raises(EngineDeadError, match=r"the connection to it broke"):
        group.call("payload")
    assert "is gone" in ends(run)
