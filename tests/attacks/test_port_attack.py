"""Ports beside the HTTP server's: of nodes, and of ranks on several machines (`processes/test_multi_port.py`: of a supervisor of servers).

Each machine is an address of its own here. Strangers send bytes to every listening port of both, hold connections open, and start
nodes with another key.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from attacked_server import INNOCENT, TEXT, AttackedServer, note, together
from conftest import Start
from server_process import RANK, SOURCE, family, running

from quire import env

KEY, OTHER = "0123456789abcdef0123456789abcdef", "another key, another key, another key"
HEAD, NODE = "127.0.0.1", "127.0.0.2"
MODEL = "quire-tiny"
LISTENS = "0A"  # in /proc/net/tcp
SILENT = 100
MOST_LOG = 200
"""Lines that strangers may add to the log."""

ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0"
STRANGERS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "noise": secrets.token_bytes(4096),
    "zeros": bytes(1 << 16),
    "ones": b"\xff" * (1 << 16),
    "zmtp without a key": ZMTP + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x19\x05READY" + bytes(19),
    "zmtp of curve": ZMTP + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
    "a large length": b"\x7f\xff\xff\xff\xff\xff\xff\xff",
    "a pickle": b"\0\0\0\x20\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
}  # fmt: skip


def free_port(host: str = HEAD) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def addresses(pids: list[int]) -> list[tuple[str, int]]:
    """Where these processes listen for TCP."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(each))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in sockets:
                host, _, port = local.partition(":")
                found.append((address_of(host), int(port, 16)))
    return sorted(found)


def address_of(text: str) -> str:
    """Of a table of the kernel: words of 32 bits, each as a number of this machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)


class Node:
    """`quire serve --headless`: another machine."""

    def __init__(
        self, folder: Path, flags: list[str], key: str = KEY, user: dict[str, str] | None = None
    ):
        """`user`: environment of a user of this machine who names no file with a key."""
        file = folder / f"key-{secrets.token_hex(4)}"
        file.write_text(key)
        keys = {"QUIRE_CLUSTER_KEY_FILE": str(file)} if user is None else user
        environ = {**os.environ, "PYTHONPATH": SOURCE, **keys, "QUIRE_HOST_IP": NODE}
        self.log = folder / f"log-{secrets.token_hex(4)}"
        words = [sys.executable, "-m", "quire", "serve", MODEL, "--headless", "--dtype", "float32", *flags]  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(words, env=environ, stdout=out, stderr=out)


def ports(server: AttackedServer, node: Node) -> list[tuple[str, int]]:
    """Where both machines listen, except for HTTP, and except for gloo in ranks.

    Gloo keeps each connection until its rank ends and has no keys, so its ports are for a closed network only (docs/machines.md).
    """
    found = []
    for pid in (server.process.pid, node.process.pid):
        ranks = running(pid, RANK)
        found += addresses([one for one in family(pid) if one not in ranks])
    return [address for address in found if address[1] != httpx.URL(server.url).port]


LAYOUTS: dict[str, Callable[[], tuple[list[str], list[str]]]] = {}


def layout(make: Callable[[int], tuple[list[str], list[str]]]) -> None:
    """The flags of both machines, and the flags that only the second one has."""
    LAYOUTS[make.__name__] = lambda: make(free_port())


@layout
def engines(port: int) -> tuple[list[str], list[str]]:
    return ["-dp", "2", "-dpl", "1", "-dpa", HEAD, "-dpp", str(port)], ["-dpr", "1"]


@layout
def ranks(port: int) -> tuple[list[str], list[str]]:
    return ["-tp", "2", *nodes(port)], ["--node-rank", "1"]


@layout
def stages(port: int) -> tuple[list[str], list[str]]:
    return ["-pp", "2", *nodes(port)], ["--node-rank", "1"]


def nodes(port: int) -> list[str]:
    return ["--nnodes", "2", "--master-addr", HEAD, "--master-port", str(port)]


Two = tuple[AttackedServer, Node, list[str]]


@pytest.fixture(params=list(LAYOUTS))
def two(request: pytest.FixtureRequest, started: Start, tmp_path: Path) -> Iterator[Two]:
    """A server and a node, and the flags of such a node."""
    both, only = LAYOUTS[request.param]()
    size = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "64", "--max-model-len", "2048"]
    node = Node(tmp_path, [*size, *both, *only])
    key = tmp_path / "key"
    key.write_text(KEY)
    try:
        yield started(*both, env={"QUIRE_CLUSTER_KEY_FILE": str(key)}), node, [*size, *both, *only]
    finally:
        node.process.kill()
        node.process.wait()


def say(address: tuple[str, int], data: bytes, seconds: float = 7.0) -> bytes:
    """What is answered until the connection is closed, or for so long."""
    found = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=seconds) as own:
        own.sendall(data)
        while len(found) < 1 << 20 and (piece := own.recv(1 << 16)):
            found += piece
    return found


@pytest.mark.attack
def test_strangers_at_every_port_change_nothing(two: Two):
    server, node, _ = two
    pids = family(node.process.pid)
    lines = len(server.lines)
    targets = ports(server, node)
    note(f"{len(targets)} ports: {targets}")
    assert targets
    with server.attack(seconds=240) as measured:
        for data in STRANGERS.values():
            found = together(len(targets), lambda at, data=data: say(targets[at], data), 30)
            assert all(len(answer) < 1024 for answer in found), found
            assert server.innocent() == server.expected
        assert served_by_all(server)
    measured.check(http_mib=64, engine_mib=64)
    assert family(node.process.pid) == pids
    assert len(server.lines) - lines < MOST_LOG, server.output[-2000:]


def served_by_all(server: AttackedServer) -> bool:
    """Eight requests at a time give the same tokens, wherever they are computed."""

    def tokens(_: int) -> str:
        answer = httpx.post(server.url + TEXT, json=INNOCENT, timeout=60)
        return json.dumps(answer.json()["choices"][0]["token_ids"])

    return set(together(8, tokens)) == {server.expected}


@pytest.mark.attack
def test_silent_connections_keep_nobody_out(two: Two):
    server, node, _ = two
    pids = family(node.process.pid)
    targets = ports(server, node)
    with server.attack(seconds=240) as measured, contextlib.ExitStack() as stack:
        for address in targets:
            for number in range(SILENT):
                with contextlib.suppress(OSError):
                    own = stack.enter_context(socket.create_connection(address, timeout=2))
                    own.sendall(b"\xff" * (number % 4))
        assert served_by_all(server)
        cores = server.cores(3.0)
        note(f"{cores:.2f} cores beside {SILENT} silent connections at each of {targets}")
        assert cores < 0.5
    measured.check(http_mib=64, engine_mib=64)
    assert family(node.process.pid) == pids


@pytest.mark.attack
def test_a_node_with_another_key_is_refused(two: Two, tmp_path: Path):
    server, node, flags = two
    pids = family(node.process.pid)
    with server.attack(seconds=150) as measured:
        stranger = Node(tmp_path, flags, OTHER)
        try:
            assert stranger.process.wait(120) == 1
        finally:
            stranger.process.kill()
            stranger.process.wait()
        assert "QUIRE_CLUSTER_KEY_FILE" in stranger.log.read_text()
        assert served_by_all(server)
    measured.check()
    assert family(node.process.pid) == pids


def user_of(folder: Path) -> dict[str, str]:
    """The environment of a user whose cache folder is `folder`; compiled kernels are copied, since compiling takes a minute."""
    kernels = Path(str(env.get("CACHE_ROOT"))).expanduser() / "kernels"
    if kernels.is_dir():
        shutil.copytree(kernels, folder / "kernels")
    return {"QUIRE_CACHE_ROOT": str(folder)}


@pytest.mark.attack
def test_another_user_of_the_machine_gets_nothing_without_a_key_file(
    started: Start, tmp_path: Path
):
    """Both sides are on loopback addresses and name no key file, so each user's own cache folder has the key."""
    both, only = LAYOUTS["engines"]()
    mine, theirs = user_of(tmp_path / "mine"), user_of(tmp_path / "theirs")
    size = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "64", "--max-model-len", "2048"]
    flags = [*size, *both, *only]
    node = Node(tmp_path, flags, user=mine)
    try:
        server = started(*both, env=mine)
        pids = family(node.process.pid)
        with server.attack(seconds=240) as measured:
            stranger = Node(tmp_path, flags, user=theirs)
            try:
                assert stranger.process.wait(120) == 1
            finally:
                stranger.process.kill()
                stranger.process.wait()
            for address in ports(server, node):
                answers = together(len(STRANGERS), lambda at, to=address: say(to, list(STRANGERS.values())[at]), 60)  # fmt: skip
                assert not [
                    answer for answer in answers if MODEL.encode() in answer or b"float32" in answer
                ]
            assert served_by_all(server)
        measured.check(http_mib=64, engine_mib=64)
        assert family(node.process.pid) == pids
        assert "2048" not in stranger.log.read_text().partition("error:")[2]
    finally:
        node.process.kill()
        node.process.wait()
