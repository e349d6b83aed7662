"""DNS rebinding: a page under a foreign name that has this machine's address gets nothing of a server without a key."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import pytest
from asgi import ask, calling
from scripted import ScriptedEngine, make_state
from test_guard import HI

from quire.config.server import ServerConfig
from quire.server.api_keys import ApiKeys
from quire.server.app import UI_ROUTES, build_app
from quire.server.host_header import PROBES, allowed_hosts, name_of
from quire.server.middleware import OPEN
from quire.server.process import sockets
from quire.server.process.server_process import ServerProcess
from quire.server.state import ServerState

CHAT = "/v1/chat/completions"
OWN = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:1", "[::1]", "[::1]:8000", "localhost.", "localhost.:80"]  # fmt: skip
FOREIGN = ["evil.example", "evil.example:8000", "", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.7:8000",
           "localhost@evil.example", "evil.example:localhost", "[::1].evil.example", "[fe80::1]", "[::2]:80", "0.0.0.0:8000", "x]", "[", "é"]  # fmt: skip


def limits(host: str | None = None, address: str = "127.0.0.1", **more: Any) -> frozenset[str] | None:  # fmt: skip
    with socket() as listener:
        listener.bind((address, 0))
        return allowed_hosts(ServerConfig(host=host, **more), listener)


def state_with(engine: ScriptedEngine, **more: Any) -> ServerState:
    """As `ServerProcess` makes it on 127.0.0.1."""
    state = make_state(engine, **more)
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        state.hosts = allowed_hosts(state.config.server, listener)
    return state


@pytest.mark.parametrize("host", OWN)
def test_names_of_this_machine(host: str):
    state = state_with(ScriptedEngine("x"))
    assert ask(None, "GET", "/v1/models", headers={"Host": host}, state=state).status_code == 200
    assert ask(None, "POST", CHAT, HI, {"Host": host}, state).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_host_name_is_refused(host: str):
    engine = ScriptedEngine("x")
    state = state_with(engine)
    state.dev_mode = True

    async def raw(method: str, path: str, *hosts: str) -> int:
        async with calling(state, path, HI, {}, method) as call:
            call.scope["headers"] += [(b"host", one.encode()) for one in hosts]
            return int((await call.next())["status"])

    asked = [("POST", CHAT), ("POST", "/tokenize"), ("GET", "/v1/models"), ("OPTIONS", CHAT), ("GET", "/nothing"), ("GET", "/metrics")]  # fmt: skip
    for method, path in [*asked, *[("GET", path) for _, path, _ in UI_ROUTES]]:
        assert asyncio.run(raw(method, path, host)) == 403, path
        assert asyncio.run(raw(method, path, "localhost", host)) == 403, path
        assert asyncio.run(raw(method, path, host, "localhost")) == 403, path
    assert engine.asked == []
    assert engine.called == []
    for path in PROBES:
        assert asyncio.run(raw("GET", path, host)) == 200


def test_the_refusal_names_the_remedy_in_the_protocols_format():
    state = state_with(ScriptedEngine())
    for path in (CHAT, "/v1/messages"):
        answer = ask(None, "POST", path, HI, {"Host": "evil.example"}, state)
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert answer.json()["type"] == "error"


def test_host_names_are_limited_on_loopback(tmp_path: Path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "a", "key": "k"}]))
    assert limits() is not None
    assert limits(host="localhost") is not None
    assert limits(host="My-Machine") == {"my-machine"}  # its name has a loopback address here
    for open_to_names in (
        limits(address="0.0.0.0"), limits(api_key="k"), limits(api_key_file=str(file)), limits(uds="/x"),
        limits(allowed_hosts=["*"]), limits(allowed_hosts=["a.b", "*"]),
    ):  # fmt: skip
        assert open_to_names is None
    for more in ({}, {"address": "0.0.0.0"}, {"api_key": "k"}):
        assert limits(allowed_hosts=["A.b", "*.c.d"], **more) == {"a.b", "*.c.d"}


def test_names_that_are_allowed():
    state = state_with(ScriptedEngine(), allowed_hosts=["a.b", "*.c.d"])
    told = {"a.b": 200, "A.B:80": 200, "x.a.b": 403, "x.c.d": 200, "y.x.c.d": 200, "c.d": 403, "xc.d": 403, "localhost": 200, "127.0.0.1:9": 200}  # fmt: skip
    for host, status in told.items():
        answer = ask(None, "GET", "/v1/models", headers={"Host": host}, state=state)
        assert answer.status_code == status, host


def test_a_valid_key_does_not_replace_an_allowed_host():
    state = state_with(ScriptedEngine(), allowed_hosts=["a.b"], api_key="k")
    key = {"Authorization": "Bearer k"}
    for host, statuses in (("a.b", (401, 200)), ("evil.example", (403, 403))):
        found = [ask(None, "GET", "/v1/models", headers={"Host": host, **more}, state=state).status_code for more in ({}, key)]  # fmt: skip
        assert tuple(found) == statuses


def test_a_request_without_the_header_is_of_no_browser():
    async def go() -> int:
        async with calling(state_with(ScriptedEngine()), "/v1/models", {}, {}, "GET") as call:
            return int((await call.next())["status"])

    assert asyncio.run(go()) == 200


def test_a_root_path_hides_no_route():
    state = state_with(ScriptedEngine())

    async def go(path: str) -> int:
        transport = httpx.ASGITransport(build_app(state), root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(go("/api/health")) == 200
    assert asyncio.run(go("/api/v1/models")) == 403


def test_probes_are_open():
    assert PROBES < OPEN


@pytest.mark.parametrize(
    ("host", "name"),
    [("a:1", "a"), ("[::1]:1", "::1"), ("A.b.", "a.b"), ("[::1", "::1"), ("", ""), (":80", "")],
)
def test_the_name_in_a_header(host: str, name: str):
    assert name_of(host) == name


@pytest.mark.parametrize(
    ("more", "limited"), [({}, True), ({"api_key": "k"}, False), ({"allowed_hosts": ["a.b"]}, True)]
)
def test_a_listening_server_checks_host_names(more: dict[str, Any], limited: bool):
    config = make_state(None, host="127.0.0.1", port=0, **more).config
    with sockets.bind(config.server) as listener:
        serving = ServerProcess(config, listener, None, ApiKeys(config.server))
        serving.state.hosts, found = None, serving.state.hosts
    assert (found is not None) == limited
