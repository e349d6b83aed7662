"""Connections between machines: both ends have the key, and whatever else connects is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from quire.config.parallel.cluster_key import cluster_key
from quire.errors import ConfigError, StartupError
from quire.processes import keyed_socket
from quire.processes.keyed_socket import KeyRefused, accept, address_of, connect, listen
from quire.processes.port_holder import port_holder

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.2", 0) as found:
        yield found


def accepting(
    threads: ThreadPoolExecutor, listener: socket.socket, *keys: bytes
) -> Future[tuple[Connection, int]]:
    return threads.submit(lambda: accept(listener.accept()[0], keys))


def test_messages_arrive_in_both_directions(threads, listener):
    key = KEY
    server = accepting(threads, listener, OTHER, key)
    client = connect("127.0.0.2", listener.getsockname()[1], key, 10)
    there, number = server.result()
    with client, there:
        assert number == 1
        client.send_bytes(b"down" * 100_000)
        assert there.recv_bytes() == b"down" * 100_000
        there.send_bytes(b"up")
        assert client.recv_bytes() == b"up"
        assert address_of(client, peer=True) == "127.0.0.2"
        there.close()
        with pytest.raises(EOFError):
            client.recv_bytes()


def test_a_port_of_this_process_is_named():
    low = os.open(os.devnull, os.O_RDONLY)
    with listen("127.0.0.2", 0) as held:
        os.close(low)  # a descriptor that the search opens itself comes before the socket's
        name = Path("/proc/self/comm").read_text().strip()
        port = held.getsockname()[1]
        assert port_holder(port) == f" (process {os.getpid()}, {name})"
        with pytest.raises(ConfigError, match=rf"port {port}: .* \(process {os.getpid()}, "):
            listen("127.0.0.2", port)


def test_another_key_is_refused_on_both_sides(threads, listener):
    server = accepting(threads, listener, KEY)
    with pytest.raises(StartupError, match=r"127\.0\.0\.2:\d+ has another key: QUIRE_CLUSTER_KEY"):
        connect("127.0.0.2", listener.getsockname()[1], OTHER, 10)
    with pytest.raises(KeyRefused, match="another key"):
        server.result()


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xa7" * 4096, b"", b"\0\0\0\x40short"]
)
def test_a_stranger_is_refused(threads, listener, sent, monkeypatch):
    monkeypatch.setattr(keyed_socket, "PROOF_S", 0.3)
    server = accepting(threads, listener, KEY)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(sent)
        with pytest.raises(KeyRefused, match="did not prove a key"):
            server.result()


def test_a_recorded_proof_proves_nothing(threads, listener):
    """Each end chooses a number for each connection."""
    server = accepting(threads, listener, KEY)
    with socket.create_connection(listener.getsockname()) as first:
        greeting = keyed_socket.receive(first)[-32:]
        answer = b"n" * 32 + keyed_socket._proof(KEY, b"client", bytes(greeting) + b"n" * 32)
        keyed_socket.send(first, answer)
        server.result()[0].close()
    again = accepting(threads, listener, KEY)
    with socket.create_connection(listener.getsockname()) as second:
        keyed_socket.send(second, answer)
        with pytest.raises(KeyRefused):
            again.result()


def test_where_nothing_listens_the_error_names_the_address():
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"127\.0\.0\.2 port {port}: .* \(process {os.getpid()}, .*--master-port",
        ):
            listen("127.0.0.2", port)
    with pytest.raises(StartupError, match=rf"127\.0\.0\.2:{port} within \d s: Connection refused"):
        connect("127.0.0.2", port, KEY, 0.2)


def greet(listener: socket.socket) -> None:
    with listener.accept()[0] as peer:
        peer.sendall(b"220 mail.example.com ESMTP\r\n")


def test_a_process_of_another_kind_is_no_head(threads):
    with socket.create_server(("127.0.0.2", 0)) as other:
        threads.submit(greet, other)
        with pytest.raises(StartupError, match="no Quire process answers"):
            connect(*other.getsockname(), KEY, 0.4)


def test_the_key_is_read_from_a_file(tmp_path: Path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"10\.0\.0\.1, which needs a key: set QUIRE_CLUSTER_KEY_FILE"
    ):
        cluster_key("10.0.0.1")
    file = tmp_path / "key"
    monkeypatch.setenv("QUIRE_CLUSTER_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match="No such file"):
        cluster_key("10.0.0.1")
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes, and needs 16"):
        cluster_key("127.0.0.1")
    file.write_text("0123456789abcdef\n")
    assert cluster_key("10.0.0.1") == b"0123456789abcdef"


def test_a_loopback_address_has_a_key_of_the_user(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    key, file = cluster_key("127.0.0.3"), tmp_path / "cache" / "cluster_key"
    assert cluster_key("localhost") == cluster_key("::1") == key == file.read_bytes()
    assert len(key) == 64
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in file.parent.iterdir()] == ["cluster_key"]
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="a file of this user that no other user can read"):
        cluster_key("127.0.0.1")
    file.unlink()
    file.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="cluster_key: "):
        cluster_key("127.0.0.1")


def test_the_old_key_of_loopback_addresses_is_refused(threads, listener):
    server = accepting(threads, listener, KEY)
    with pytest.raises(StartupError, match="another key"):
        connect("127.0.0.2", listener.getsockname()[1], b"loopback", 10)
    with pytest.raises(KeyRefused):
        server.result()
