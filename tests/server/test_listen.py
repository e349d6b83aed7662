"""Sockets: addresses, heads that are too long, access log."""

from __future__ import annotations

import asyncio
import logging
import resource
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scripted import ScriptedEngine, make_state

from quire.config.engine import EngineConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError, StartupError
from quire.protocol.output import EngineReady
from quire.protocol.pooling_info import PoolingInfo
from quire.server.app import build_app
from quire.server.process import launch, sockets
from quire.server.process.banner import curl_line, facts_table, failure, stages_table, warnings


async def talk(config: ServerConfig, *sent: bytes) -> list[bytes]:
    """Answers of a real server on a free port, a connection for each of `sent`."""
    listener = sockets.bind(config)
    server = sockets.http_server(build_app(make_state(ScriptedEngine())), config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    answers = []
    for data in sent:
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(data)
        answers.append(await asyncio.wait_for(reader.read(), 60))
        writer.close()
    server.should_exit = True
    await serving
    return answers


def test_a_server_may_have_as_many_connections_as_the_system_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 512)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        asyncio.run(talk(ServerConfig(host="127.0.0.1", port=0), b"GET /version HTTP/1.0\r\n\r\n"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(sockets.MOST_FILES, hard), hard)
        sockets.allow_files(low)  # never less than there was
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_too_long_head_is_refused_while_receiving():
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    many = b"".join(b"x-%d: %s\r\n" % (at, b"y" * 100) for at in range(20))
    config = ServerConfig(host="127.0.0.1", port=0, h11_max_incomplete_event_size=1000)
    good, long_url, headers = asyncio.run(
        talk(
            config,
            head + b"\r\n",
            b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\n\r\n",
            head + many + b"\r\n",
        )
    )
    assert good.startswith(b"HTTP/1.1 200")
    assert long_url.startswith(b"HTTP/1.1 400")
    assert headers.startswith(b"HTTP/1.1 400")


def test_a_head_that_does_not_come_is_not_waited_for():
    config = ServerConfig(host="127.0.0.1", port=0, receive_timeout=0.1)
    whole = b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"
    # A machine that stands still may take that long for the whole one, but not always.
    nothing, half, *good = asyncio.run(talk(config, b"", b"GET /version HT", *[whole] * 9))
    assert nothing == half == b""
    assert any(answer.startswith(b"HTTP/1.1 200") for answer in good)


def test_the_servers_idle_timeout_exceeds_that_of_clients():
    """(Both did after 5 s; a request that was on its way just then failed.)"""
    app = build_app(make_state(ScriptedEngine()))
    server = sockets.http_server(app, ServerConfig(host="127.0.0.1", port=0))
    assert server.config.timeout_keep_alive > 90 > (httpx.Limits().keepalive_expiry or 0)


def test_a_port_in_use_is_reported_before_loading():
    with sockets.bind(ServerConfig(host="127.0.0.1", port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1 port {port}.*--port"):
            sockets.bind(ServerConfig(host="127.0.0.1", port=port))


def test_an_unavailable_address_is_reported():
    with pytest.raises(ConfigError, match="--host"):
        sockets.bind(ServerConfig(host="192.0.2.1", port=0))


def test_without_a_key_the_server_listens_on_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sockets, "in_container", lambda: False)
    assert sockets.host_of(ServerConfig()) == "127.0.0.1"
    assert sockets.host_of(ServerConfig(api_key="k")) == "0.0.0.0"
    assert sockets.host_of(ServerConfig(api_key="k", host="::1")) == "::1"


def test_the_socket_file_of_a_dead_server_is_replaced(tmp_path: Path):
    path = str(tmp_path / "s")
    config = ServerConfig(uds=path)
    sockets.bind(config).close()
    with sockets.bind(config) as living:
        living.listen()
        with pytest.raises(ConfigError, match="another server"):
            sockets.bind(config)
        assert sockets.address(config, living) == f"unix:{path}"


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError):
        sockets.bind(ServerConfig(uds=str(tmp_path / "s")))
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "name", "url"),
    [(ServerConfig(), ("0.0.0.0", 80), "http://127.0.0.1:80"),
     (ServerConfig(), ("::", 80, 0, 0), "http://[::1]:80"),
     (ServerConfig(ssl_certfile="x"), ("10.0.0.1", 443), "https://10.0.0.1:443")],
)  # fmt: skip
def test_the_printed_address_is_reachable(
    config: ServerConfig, name: tuple[object, ...], url: str, monkeypatch: pytest.MonkeyPatch
):
    class Fake(socket.socket):
        def getsockname(self) -> tuple[object, ...]:
            return name

    with Fake() as fake:
        assert sockets.address(config, fake) == url


def test_each_process_has_a_queue_at_one_address(tmp_path: Path):
    config = ServerConfig(host="127.0.0.1", port=0)
    listeners = sockets.bind_all(config, 3)
    try:
        [name] = {listener.getsockname() for listener in listeners}
        for listener in listeners:
            listener.listen(64)
            listener.setblocking(False)
        clients = [socket.create_connection(name, 5) for _ in range(60)]
        counts = [len(accepted(listener)) for listener in listeners]
        for client in clients:
            client.close()
        assert sum(counts) == 60
        assert min(counts) > 0
        taken = ServerConfig(host="127.0.0.1", port=name[1])
        for count in (1, 3):  # another server is not to share it
            with pytest.raises(ConfigError, match=f"port {name[1]}"):
                sockets.bind_all(taken, count)
    finally:
        for listener in listeners:
            listener.close()
    one, other = sockets.bind_all(ServerConfig(uds=str(tmp_path / "s")), 2)
    assert one is other
    one.close()


def accepted(listener: socket.socket) -> list[object]:
    found: list[object] = []
    try:
        while True:
            connection, _ = listener.accept()
            connection.close()
            found.append(connection)
    except BlockingIOError:
        return found


def test_several_processes_need_an_engine_of_its_own():
    config = EngineConfig.from_keywords(
        model="quire-tiny", api_server_count=2, disable_frontend_multiprocessing=True
    )
    with pytest.raises(ConfigError, match="disable-frontend-multiprocessing"):
        launch.serve(config)


def test_quiet_paths_are_not_in_the_access_log():
    quiet = sockets.PathFilter("/health, /metrics")
    arguments = [("1", "GET", path, "1.1", 200) for path in ("/health", "/health?x", "/v1/models")]
    records = [logging.LogRecord("x", 20, "", 1, "%s", one, None) for one in arguments]
    assert [quiet.filter(record) for record in records] == [False, False, True]
    below = sockets.PathFilter("/v1/models", "/api")
    assert [below.filter(record) for record in records] == [True, True, True]
    assert not below.filter(logging.LogRecord("x", 20, "", 1, "%s", ("1", "GET", "/api/v1/models"), None))  # fmt: skip


def test_the_curl_line_contains_no_secret():
    config = make_state(None, api_key="secret").config
    line = curl_line(config, "http://127.0.0.1:8000", "a'b", chats=True)
    assert "secret" not in line
    assert "$QUIRE_API_KEY" in line
    assert "/v1/chat/completions" in line
    assert "/v1/completions" in curl_line(config, "unix:/tmp/s", "m", chats=False)
    for tasks, path in (
        (["embed", "token_embed"], "/v1/embeddings"),
        (["classify"], "/classify"),
        (["token_classify"], "/pooling"),
    ):
        line = curl_line(config, "http://a", "m", True, PoolingInfo(tasks=tasks))
        assert f"{path} " in line
        assert '\'{"model": "m", "input": ' in line


def test_the_curl_line_of_a_speech_model_has_a_sound_file(tmp_path: Path):
    def words(model: str) -> list[str]:
        config = make_state(None).config
        config = replace(config, model=replace(config.model, model=model))
        return shlex.split(curl_line(config, "http://a", "m", False, hears=True))

    line = ["curl", "-s", "http://a/v1/audio/transcriptions", "-F"]
    assert words("openai/whisper-small") == words(str(tmp_path)) == [*line, "file=@speech.wav"]
    (tmp_path / "sample.wav").touch()
    assert words(str(tmp_path)) == [*line, f"file=@{tmp_path}/sample.wav"]


@pytest.mark.parametrize(("tokens", "cache"), [(128, "100 blocks of 4 tokens: 2.0 full contexts"), (0, "none")])  # fmt: skip
def test_the_table_has_the_kv_cache(tokens: int, cache: str):
    ready = EngineReady(64, 100, 4, 97, "float32", "cpu", "Toy", "native", 1, num_tokens=tokens)
    lines = facts_table(make_state(None).config, ready, "http://a").splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if "KV cache" in line] == [cache]


@pytest.mark.parametrize(("host", "more"), [("0.0.0.0", " (listening on 0.0.0.0: on all addresses of this machine)"), ("127.0.0.1", "")])  # fmt: skip
def test_the_table_says_where_the_server_listens(host: str, more: str):
    ready = EngineReady(64, 100, 4, 97, "float32", "cpu", "Toy", "native", 1, num_tokens=128)
    told = facts_table(make_state(None, host=host).config, ready, "http://127.0.0.1:8")
    assert [line.split(maxsplit=1)[1] for line in told.splitlines() if "address" in line] == [f"http://127.0.0.1:8{more}"]  # fmt: skip


def test_a_failed_start_is_one_report():
    report = failure(StartupError("no room", "Traceback ...\n  x\n"))
    assert report.endswith("quire serve: error: no room")
    assert report.count("no room") == 1
    assert "Traceback" in report


def test_startup_stages_cover_the_whole_start() -> None:
    lines = stages_table(
        [("importing torch", 1.5), ("short", 0.001), ("loading the model", 2.25)], 5.0
    )
    seconds = {line.rpartition("  ")[0].strip(): line.split()[-2] for line in lines.splitlines()}
    assert list(seconds.values()) == ["1.50", "2.25", "1.25", "5.00"]
    assert "other: imports, processes, tokenizer" in seconds


@pytest.mark.parametrize(
    ("given", "cores", "says"),
    [
        ({"host": "0.0.0.0"}, 8, "without an API key"),
        ({"host": "0.0.0.0", "api_key": ["k"]}, 8, ""),
        ({"host": "127.0.0.1"}, 2, ""),
        ({"api_server_count": 2, "distributed_executor_backend": "mp", "host": "localhost"}, 3, "3 physical cores for 4 processes"),
        ({"disable_frontend_multiprocessing": True, "host": "localhost"}, 1, ""),
    ],
)  # fmt: skip
def test_what_a_ready_server_warns_of(given: dict[str, object], cores: int, says: str):
    """Not before: a start that fails has another message."""
    found = warnings(EngineConfig.from_keywords(model="none", **given), cores)
    assert len(found) == bool(says)
    assert says in "".join(found)


def test_a_ready_server_warns_of_adapters_that_clients_load(monkeypatch: pytest.MonkeyPatch):
    def found(**given: object) -> list[str]:
        return warnings(EngineConfig.from_keywords(model="none", host="127.0.0.1", **given), 4)

    assert found(enable_lora=True) == []
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert ["--enable-lora" in one for one in found()] == [True]
    assert ["--allowed-lora-paths" in one for one in found(enable_lora=True)] == [True]
    assert found(enable_lora=True, allowed_lora_paths=["/adapters"]) == []
