"""RedisStore returns a block exactly as it was written, or no block, whatever the server does."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_tiers.redis_server import client, needs_redis, redis_server

from quire.config.from_keywords import engine_config
from quire.config.print_config import as_yaml
from quire.config.validate import check_options
from quire.errors import ConfigError
from quire.kvstore import redis_link, redis_store
from quire.kvstore.record import PAGE, BadRecord, mac_key, record_size
from quire.kvstore.redis_link import check_url, shown
from quire.kvstore.redis_store import RedisStore

pytestmark = needs_redis
IDENTITY, KEY = bytes(range(16)), mac_key(b"k" * 32)
LENGTH, TTL = 21_000, 3600
ONE, FOUR = b"0" * 28 + b"0001", b"0" * 28 + b"0004"
"""Names of blocks, as keys of the server have them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty server, and a record of three parts."""
    client(server).flushall()
    monkeypatch.setattr(redis_store, "PART", 8192)
    monkeypatch.setattr(redis_store, "PROBE_BYTES", 4096)
    return server


def made(url: str, identity: bytes = IDENTITY, key: bytes = KEY) -> RedisStore:
    store = RedisStore(url, lambda: (identity, {}), key, TTL)
    store.open()
    return store


def name(number: int) -> tuple[int, bytes]:
    return number % 3, number.to_bytes(16, "big")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def put(store: RedisStore, number: int) -> bool:
    page = memoryview(bytearray(record_size(LENGTH)))
    page[PAGE : PAGE + LENGTH] = content(number)
    return store.write(name(number), LENGTH, page)


def get(store: RedisStore, number: int) -> bytes:
    page = memoryview(bytearray(record_size(LENGTH)))
    store.read(name(number), LENGTH, page)
    return bytes(page[PAGE : PAGE + LENGTH])


def reason(store: RedisStore, number: int) -> str:
    with pytest.raises(BadRecord) as why:
        get(store, number)
    return str(why.value)


def test_another_store_finds_what_one_has_written(url: str) -> None:
    first, second = made(url), made(url)
    assert first.is_open
    assert all(put(first, number) for number in range(5))
    assert not put(first, 3)
    assert name(3) not in second
    second.find([name(number) for number in range(7)])
    assert [name(number) in second for number in range(7)] == [True] * 5 + [False] * 2
    assert [get(second, number) for number in range(5)] == [*map(content, range(5))]
    assert reason(second, 6) == "missing"
    assert not put(second, 4)
    keys = client(url).keys("*")
    assert len(keys) == 5 * 4
    assert all(0 < client(url).ttl(key) <= TTL for key in keys)
    client(url).expire(keys[0], 5)
    for number in range(5):
        get(first, number)
    assert client(url).ttl(keys[0]) > 5  # a use is the start of a new hour


def test_an_engine_of_another_kind_or_key_finds_nothing(url: str) -> None:
    store, other, stranger = made(url), made(url, bytes(16)), made(url, key=mac_key(b"o" * 32))
    put(store, 1)
    assert reason(other, 1) == "missing"
    assert reason(stranger, 1) == "mac"


def changed(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


ATTACKS: dict[str, tuple[Callable[[Any, list[bytes]], Any], set[str]]] = {
    "a payload byte": (lambda c, k: c.set(k[1], changed(c.get(k[1]))), {"mac"}),
    "a header byte": (lambda c, k: c.setrange(k[0], 60, b"x"), {"header", "mac", "identity", "name"}),
    "a MAC of zeros": (lambda c, k: c.setrange(k[0], 76, bytes(40)), {"mac", "header"}),
    "a cut part": (lambda c, k: c.set(k[2], c.get(k[2])[:-1]), {"length"}),
    "a longer part": (lambda c, k: c.append(k[2], b"x"), {"length"}),
    "an oversize part": (lambda c, k: c.setrange(k[1], 100 << 20, b"x"), {"length"}),
    "a part is gone": (lambda c, k: c.delete(k[2]), {"short"}),
    "all is gone": (lambda c, k: c.flushall(), {"missing"}),
    "parts are exchanged": (lambda c, k: c.mset({k[1]: c.get(k[2])[:8192].ljust(8192), k[2]: c.get(k[1])}), {"mac", "length"}),
    "a list": (lambda c, k: (c.delete(k[0]), c.lpush(k[0], "x")), {"refused"}),
    "the record of another name": (lambda c, k: [c.copy(k[n].replace(ONE, FOUR), k[n], replace=True) for n in range(4)], {"name"}),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_others_have_written_is_a_miss_and_is_repaired(attack: str, url: str) -> None:
    store = made(url)
    assert put(store, 1)
    assert put(store, 4)
    keys = sorted(key for key in client(url).keys("*") if ONE in key)
    assert len(keys) == 4
    act, reasons = ATTACKS[attack]
    act(client(url), keys)
    assert reason(store, 1) in reasons
    assert name(1) not in store
    assert store.is_open
    store.find([name(1)])
    assert name(1) not in store  # the server may have the name, and this store knows better
    if client(url).type(keys[0]) == b"list":
        client(url).delete(keys[0])
    assert put(store, 1)
    assert get(made(url), 1) == content(1)


def test_a_server_without_memory_is_still_read(url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = made(url)
    put(store, 1)
    client(url).config_set("maxmemory", 1)
    try:
        assert not put(store, 2)
        assert get(store, 1) == content(1)
        assert not put(store, 3)
    finally:
        client(url).config_set("maxmemory", 0)
    assert caplog.text.count("takes no blocks now") == 1


def test_a_server_that_dies_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    with redis_server(tmp_path) as url:
        store = made(url)
        put(store, 1)
    assert reason(store, 1) == "down"
    assert not store.is_open
    assert reason(store, 1) == "down"
    assert not put(store, 2)
    store.find([name(1)])
    store.refresh()
    assert not store.is_open
    with redis_server(tmp_path) as url:
        store.refresh()  # too early
        assert not store.is_open
        store._retry_at = 0.0
        store.refresh()
        assert store.is_open
        assert reason(store, 1) == "missing"
        assert put(store, 1)
        assert get(store, 1) == content(1)
    assert caplog.text.count("does not work") == 1
    assert "pw" not in caplog.text


def test_a_wrong_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as url:
        assert not made(f"{url}?password=wrong-pw").is_open
        assert made(f"{url}?password=right").is_open
    assert "-pw" not in caplog.text


SAYS: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda peer: time.sleep(5),
    "goodbye": lambda peer: None,
    "another protocol": lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a length and no more": lambda peer: (peer.sendall(b"$999999999999\r\n"), time.sleep(5)),
    "a byte now and then": lambda peer: [(peer.sendall(b"+"), time.sleep(0.05)) for _ in range(100)],
    "without end": lambda peer: [peer.sendall(b"$99999999\r\n" + bytes(1 << 20)) for _ in range(99)],
    "nested lists": lambda peer: peer.sendall(b"*1\r\n" * 15_000),
    "a list without end": lambda peer: peer.sendall(b"*999999999\r\n" + b":1\r\n" * 100_000),
    "a number of many digits": lambda peer: peer.sendall(b"$" + b"9" * 9000 + b"\r\n"),
    "all is well": lambda peer: [peer.sendall(b"+OK\r\n") for _ in range(200)],
    "numbers": lambda peer: [peer.sendall(b":7\r\n") for _ in range(200)],
}  # fmt: skip


@pytest.mark.parametrize("says", SAYS)
def test_what_is_no_redis_server_is_left_alone(
    says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing hangs, and no reply takes memory without a bound."""
    for limit in ("CONNECT_S", "ASK_S", "MOVE_S"):
        monkeypatch.setattr(redis_link if limit == "CONNECT_S" else redis_store, limit, 0.2)
    monkeypatch.setattr(redis_store, "SLOWEST", 1e9)
    peers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk(peer: socket.socket) -> None:
            with contextlib.suppress(OSError):
                SAYS[says](peer)

        def serve() -> None:
            while True:
                try:
                    peer = listener.accept()[0]
                except OSError:
                    return
                peers.append(peer)
                threading.Thread(target=talk, args=(peer,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        store = made(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        assert not store.is_open
        store.find([name(1)])
        assert reason(store, 1) == "down"
        assert time.monotonic() - began < 4
        listener.shutdown(socket.SHUT_RDWR)
    for peer in peers:
        peer.close()
    assert "does not work" in caplog.text


def test_options() -> None:
    for url, text in (
        ("localhost:6379", "must be redis://"), ("http://a", "must be redis://"), ("redis://a:b", "kv_remote_url"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            check_url(url)
    check_url("rediss://:pw@host:6380/2")
    assert shown("rediss://me:pw@host:6380/2?password=pw") == "rediss://host:6380/2"
    config = engine_config({"model": "m", "kv_remote_url": "redis://:pw@host"})
    assert "pw" not in as_yaml(config)
    with pytest.raises(ConfigError, match="quire kv key FILE"):
        check_options(config)
