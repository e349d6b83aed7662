"""Connections of clients that send too much, too slowly, nothing, or do not read: bounded before any key is looked at."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import uvloop
from scripted import ScriptedEngine, make_state

from quire.config.server import ServerConfig
from quire.server.app import build_app
from quire.server.process import accept, connection, sockets

GET = b"GET /x HTTP/1.1\r\n\r\n"
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
PATIENCE_S = 30.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **keywords), 60))

    return run


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.01)


class Wire(asyncio.Transport):
    """A transport whose other end is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.unsent = b"", 0
        self.paused = self.closed = self.aborted = self.eof = False

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    @property
    def ended(self) -> bool:
        """The server takes no more from it."""
        return self.closed or self.eof


def connected(app: Any, **config: Any) -> tuple[Any, Wire]:
    """A connection as the server makes it, and its wire."""
    server = sockets.http_server(app, ServerConfig(**config))
    server.config.load()
    protocol = server.config.http_protocol_class(  # type: ignore[call-arg]
        config=server.config, server_state=server.server_state, app_state={}
    )
    wire = Wire()
    protocol.connection_made(wire)  # type: ignore[arg-type]
    return protocol, wire


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads its request and never answers."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # fmt: skip
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@asynccontextmanager
async def serving(
    app: Any = None, **config: Any
) -> AsyncIterator[tuple[sockets.UvicornServer, int]]:
    """A real server on a free port."""
    config = {"host": "127.0.0.1", "port": 0, **config}
    listener = sockets.bind(ServerConfig(**config))
    app = app or build_app(make_state(ScriptedEngine(), **config))
    server = sockets.http_server(app, ServerConfig(**config))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def exchange(port: int, sent: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


# -- number and bytes -----------------------------------------------------------------------------
@in_loop
async def test_a_flood_of_pipelined_requests_is_cut():
    protocol, wire = connected(silent)
    flood, most = GET * 200_000, 0
    while flood and not wire.paused and not wire.ended:
        protocol.data_received(flood[: 256 << 10])
        flood = flood[256 << 10 :]
        most = max(most, len(protocol.pipeline))
        await asyncio.sleep(0)
    assert most <= 16


@in_loop
async def test_a_pipeline_is_bounded_while_answered():
    """Each answer resumed reading, which brought thousands more."""
    protocol, wire = connected(ok)
    flood, most = GET * 50_000, 0
    for _ in range(2000):
        if not wire.paused and not wire.ended and flood:
            protocol.data_received(flood[: 64 << 10])
            flood = flood[64 << 10 :]
        most = max(most, len(protocol.pipeline))
        await asyncio.sleep(0)
    assert most <= 16
    assert wire.ended


@in_loop
async def test_a_few_pipelined_requests_are_answered_in_order():
    async with serving() as (_, port):
        one = b"GET /version?%d HTTP/1.1\r\n\r\n"
        sent = b"".join(one % at for at in range(15)) + b"GET /health HTTP/1.0\r\n\r\n"
        found = await exchange(port, sent)
    assert found.count(b"HTTP/1.1 200 OK") == 16
    assert found.count(b'"version"') == 15


@in_loop
async def test_reading_stops_while_requests_wait():
    """Nor when the running one asks for its body."""
    protocol, wire = connected(silent)
    protocol.data_received(b"POST /x HTTP/1.1\r\ncontent-length: 1\r\n\r\nx" + GET)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.paused


@in_loop
async def test_a_disconnect_reaches_all_pipelined_requests():
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await silent(scope, receive, send)
        ended.append(scope["path"])

    protocol, _ = connected(app)
    protocol.data_received(GET + GET)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    await until(lambda: ended)
    assert ended == ["/x"]  # the second never began


CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [(b"GET /x HTTP/1.1\r\nx: ", b"y"), (b"GET /x HTTP/1.1\r\nx", b"y"), (b"GET /", b"y"), (b"", b"\r\n"),
     (CHUNKED + b"1;", b"y"), (CHUNKED + b"0\r\nx: ", b"y"), (CHUNKED + b"0\r\n", b"x: y\r\n"), (CHUNKED + b"0", b"0")],
    ids=["value", "name", "url", "newlines", "extension", "trailer", "trailers", "size"],
)  # fmt: skip
@in_loop
async def test_endless_heads_are_cut(start: bytes, piece: bytes):
    protocol, wire = connected(silent)
    protocol.data_received(start)
    taken, piece = 0, piece * (16_000 // len(piece))
    while not wire.ended and taken < 4 << 20:
        protocol.data_received(piece)
        taken += len(piece)
        await asyncio.sleep(0)
    assert taken < 160 << 10


@in_loop
async def test_headers_are_counted():
    async with serving() as (_, port):
        head = b"GET /version HTTP/1.0\r\n"
        few = await exchange(port, head + b"a: b\r\n" * 200 + b"\r\n")
        many = await exchange(port, head + b"a: b\r\n" * 300 + b"\r\n")
    assert few.startswith(b"HTTP/1.1 200")
    assert many.startswith(b"HTTP/1.1 400")


@in_loop
async def test_nonsense_behind_a_request_does_not_stand_in_its_answer():
    gate = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await gate.wait()
        await ok(scope, receive, send)

    protocol, wire = connected(app)
    protocol.data_received(GET)
    await asyncio.sleep(0)
    protocol.data_received(b"nonsense\r\n\r\n")
    assert wire.sent == b""
    gate.set()
    await until(lambda: wire.closed)
    assert wire.sent.startswith(b"HTTP/1.1 200")
    assert wire.sent.endswith(b"ok")
    assert b"connection: close" in wire.sent


SMUGGLED = {
    "both lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n",
    "odd encoding": b"transfer-encoding: xchunked\r\n",
    "encoding not last": b"transfer-encoding: chunked, identity\r\n",
    "folded": b"x: a\r\n b\r\ntransfer-encoding: chunked\r\n",
    "bare newline": b"x: a\ncontent-length: 5\r\n",
    "space before the colon": b"content-length : 5\r\n",
    "nul": b"x: a\0b\r\n",
    "plus": b"content-length: +5\r\n",
    "hexadecimal": b"content-length: 0x5\r\n",
    "control": b"x: a\x01b\r\n",
    "bell in a name": b"x\x07: a\r\n",
    "return": b"x: a\rb\r\n",
}


@pytest.mark.parametrize("headers", SMUGGLED.values(), ids=SMUGGLED.keys())
@in_loop
async def test_ambiguous_framing_is_refused(headers: bytes):
    async with serving() as (_, port):
        sent = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n" + headers + b"\r\n0\r\n\r\n"
        found = await exchange(port, sent)
    assert found.startswith(b"HTTP/1.1 400")
    assert found.count(b"HTTP/1.1") == 1


# -- time -----------------------------------------------------------------------------------------
async def closes(port: int, sent: bytes, drip: bytes) -> bytes:
    """What the server sends until it closes on a client that sends `drip` again and again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    found = asyncio.ensure_future(reader.read())
    end = time.monotonic() + 15
    while not found.done():
        assert time.monotonic() < end, "it is still open"
        writer.write(drip)
        await asyncio.sleep(0.05)
    writer.close()
    try:
        return found.result()
    except ConnectionResetError:  # it went on sending after the close
        return b""


@pytest.mark.parametrize(
    ("sent", "drip"),
    [(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10000\r\n\r\n", b"x"),
     (b"GET /health HTTP/1.1\r\n\r\n", b"\r\n"), (b"", b"\r\n"), (b"GET /x HTTP/1.1\r\nx: ", b"y"), (b"", b"")],
    ids=["401drip", "crlf", "crlf at first", "header", "nothing"],
)  # fmt: skip
@in_loop
async def test_slow_senders_are_disconnected(
    sent: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(connection, "LINGER_S", 0.3, raising=False)
        async with serving(receive_timeout=0.4, api_key="k") as (_, port):
            await closes(port, sent, drip)


@in_loop
async def test_an_early_answer_closes_the_connection_readably():
    """A close with unread bytes would reset the connection, and the client would lose the answer."""
    async with serving(api_key="k") as (_, port):
        for size in (100, 4 << 20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            assert head.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in head
            writer.write(b"x" * size)
            await writer.drain()
            assert b"API key" in await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()


@in_loop
async def test_a_received_body_keeps_the_connection_open():
    async with serving(api_key="k") as (_, port):
        one = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
        found = await exchange(port, one + one + b"GET /health HTTP/1.0\r\n\r\n")
    assert found.count(b"HTTP/1.1 401") == 2
    assert found.count(b"HTTP/1.1 200") == 1


# -- clients that do not read ---------------------------------------------------------------------
def small_window(port: int) -> socket.socket:
    """A client with little room for what it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


@in_loop
async def test_an_unread_answer_is_aborted():
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
        ended.set()

    async with serving(app, send_timeout=0.4) as (server, port):
        with small_window(port) as client:
            client.sendall(GET)
            await asyncio.wait_for(ended.wait(), 20)
            await until(lambda: not server.server_state.connections)


@in_loop
async def test_a_stream_that_is_not_read_is_aborted_in_the_engine():
    engine = ScriptedEngine(*["word " * 2000] * 3000)
    app = build_app(make_state(engine))
    body = b'{"prompt": "a", "stream": true, "max_tokens": 9}'
    async with serving(app, send_timeout=0.4) as (server, port):
        with small_window(port) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))  # fmt: skip
            await until(lambda: engine.aborted)
            await until(lambda: not server.server_state.connections)


@in_loop
async def test_a_client_that_reads_slowly_is_served():
    protocol, wire = connected(silent, send_timeout=10)
    protocol.data_received(GET)
    protocol.pause_writing()
    wire.unsent = 70_000
    now = protocol.loop.time()
    for _ in range(20):
        now, wire.unsent = now + 9, wire.unsent - 1
        protocol.check(now)
    assert not wire.aborted
    protocol.check(now + 10)
    assert wire.aborted
    protocol.connection_lost(None)


@in_loop
async def test_a_closing_connection_does_not_wait_for_unread_data():
    """`close` waits until everything is sent: forever, if the client does not read."""
    protocol, wire = connected(ok, send_timeout=10)
    protocol.data_received(b"GET /x HTTP/1.0\r\n\r\n")
    await until(lambda: wire.closed)
    wire.unsent = 100
    now = protocol.loop.time()
    protocol.check(now)
    protocol.check(now + 9)
    assert not wire.aborted
    protocol.check(now + 10)
    assert wire.aborted


# -- descriptors ----------------------------------------------------------------------------------
def allow(server: sockets.UvicornServer, count: int) -> None:
    """As if the system allowed this process `count` descriptors more, beside the reserve."""
    with socket.socket() as lowest:
        server.servers[0].most = lowest.fileno() + count  # type: ignore[attr-defined]


@in_loop
async def test_idle_connections_are_closed_for_new_ones():
    with ExitStack() as clients:
        async with serving() as (server, port):
            for _ in range(60):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            allow(server, 10)
            found = await exchange(port, b"GET /health HTTP/1.0\r\n\r\n")  # the last in the queue
            await until(lambda: len(server.server_state.connections) <= 12)
    assert found.startswith(b"HTTP/1.1 200")


@in_loop
async def test_a_connection_beyond_the_limit_is_refused():
    with ExitStack() as clients:
        async with serving(silent) as (server, port):
            for _ in range(10):
                client = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
                clients.enter_context(client).sendall(GET)
            await until(lambda: len(server.server_state.tasks) == 10)
            allow(server, 0)
            found = await exchange(port, b"GET /health HTTP/1.0\r\n\r\n")
            busy = len(server.server_state.tasks)
            clients.close()
    assert found.startswith(b"HTTP/1.1 503")
    assert busy == 10


def test_some_descriptors_are_no_connections():
    """Of few, a quarter."""
    for files, reserved in ((1 << 16, accept.RESERVED_FILES), (100, 25)):
        assert accept.most_descriptors(files) == files - reserved


# -- TLS ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "k.pem"), "-out", str(folder / "c.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@in_loop
async def test_a_handshake_that_never_ends_is_closed(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
):
    tls = {"ssl_certfile": str(certificate / "c.pem"), "ssl_keyfile": str(certificate / "k.pem")}
    with monkeypatch.context() as patched:
        patched.setattr(accept, "HANDSHAKE_S", 0.3, raising=False)
        async with serving(**tls) as (_, port):
            assert await exchange(port, b"") == b""
            patched.undo()  # a busy machine takes longer over a handshake
            context = ssl.create_default_context(cafile=str(certificate / "c.pem"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            assert re.match(rb"HTTP/1.1 200", await asyncio.wait_for(reader.read(), PATIENCE_S))
            writer.close()
