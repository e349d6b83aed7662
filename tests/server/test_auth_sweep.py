"""Without a key nothing but the open paths answers: every method on every path, every spelling of a path, every prefix.

At the level of ASGI where the router decides, and through a real connection where the HTTP library decodes paths.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import ask, browser
from scripted import ScriptedEngine, make_state

from quire.config.server import ServerConfig
from quire.config.unsupported import DEV_ROUTES as UNSUPPORTED_DEV_ROUTES
from quire.config.unsupported import ROUTES as UNSUPPORTED_ROUTES
from quire.server import api_keys
from quire.server.api_keys import ApiKeys
from quire.server.app import DEV_ROUTES, ROUTES, UI_ROUTES, build_app
from quire.server.middleware import OPEN
from quire.server.process import sockets
from quire.server.state import ServerState

METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "FOO",
)
KEY = {"Authorization": "Bearer k"}
ROWS = ROUTES + UI_ROUTES + DEV_ROUTES
PATHS = [re.sub(r"\{\w+(:path)?\}", "x", path) for _, path, _ in ROWS]
PATHS += ["/docs", "/openapi.json", "/redoc", "/nothing", "/health/x", "/v1", "/v1/", *UNSUPPORTED_ROUTES, *UNSUPPORTED_DEV_ROUTES]  # fmt: skip


def guarded(engine: ScriptedEngine | None = None, **more: Any) -> ServerState:
    state = make_state(engine or ScriptedEngine("x"), api_key="k", **more)
    state.dev_mode = True
    return state


class Raw:
    """An application that is asked by scope, many times."""

    def __init__(self, state: ServerState):
        self.app = build_app(state)

    async def __call__(self, method: str, path: str, kind: str = "http", root: str = "", *headers: tuple[bytes, bytes]) -> Any:  # fmt: skip
        told: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"{}"} if not told else {"type": "http.disconnect"}  # fmt: skip

        async def send(message: Any) -> None:
            told.append(message)

        scope = {
            "type": kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": root, "client": ("127.0.0.1", 1), "server": ("server", 80),
            "headers": [(b"content-type", b"application/json"), *headers], "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        return told[0] if kind == "websocket" else told[0]["status"]


def test_every_method_on_every_path():
    engine = ScriptedEngine("x")
    asked = 0

    async def go() -> None:
        nonlocal asked
        raw = Raw(guarded(engine))
        for path in PATHS:
            for method in METHODS:
                status = await raw(method, path)
                asked += 1
                if path in OPEN:
                    assert status != 401, (method, path)
                elif method == "OPTIONS":
                    assert status in (404, 405), (
                        path
                    )  # browsers send no key with it, and it does nothing
                else:
                    assert status == 401, (method, path)

    asyncio.run(go())
    assert asked > 800
    assert engine.asked == []
    assert engine.called == []


BEFORE = ("/", "//", "/./", "/x/../", "/%2e/", "/health/../", "/health/%2e%2e/", "/health/..%2f", "/health//", "/health;/", "/ping/..;/",
          "/\\", "/%5c", "/%2f", "/;", "/ui/../", "/health%00/../", "/metrics?/", "/health#/../", "http://x/health/../", "http://x//", "*/", "/health%20/../", "/health%0a/")  # fmt: skip
AFTER = ("", "/", "//", "/.", "/..;/health", "%00", "%00/health", ";", ";/health", "/health", "/../health", "%2f..%2fhealth", "%20", "%09", "\\", "/%2e%2e/health", "?/health", "?x=/health", "#/health", "%3f/health", "/.%2e/.%2e/health", ".json", "%2f")  # fmt: skip


def spellings(path: str) -> list[str]:
    inner = path.removeprefix("/")
    found = [before + inner + after for before in BEFORE for after in AFTER]
    cased = [path.upper(), path.title(), path.replace("/", "//"), path.replace("/", "/./"), path.replace("/", "%2f")]  # fmt: skip
    return [*found, *cased, "/" + "".join(f"%{ord(char):02x}" for char in inner)]


def test_no_spelling_of_a_path_gets_by_over_a_connection():
    """405 of them, of a path whose answer names the model."""
    asked = spellings("/v1/models")
    assert len(asked) >= 405
    found = asyncio.run(over(guarded(), [request(target) for target in asked]))
    for target, answer in zip(asked, found, strict=True):
        assert b"toy" not in body_of(answer) or is_open(target), target
        assert status_of(answer) in (400, 401) or is_open(target), (target, answer[:80])


def is_open(target: str) -> bool:
    """What stands before a query or a fragment is an open path itself, and the answer is its own."""
    return re.split(r"[?#]", target)[0] in ("/", *OPEN)


@pytest.mark.parametrize("root", ["", "/api", "/api/", "/health", "api", "/v1", "/", "//"])
def test_no_prefix_opens_a_path(root: str):
    """As uvicorn puts --root-path before the path, and as a proxy may leave it there."""
    spelt = {"/v1/models", f"{root}/v1/models", f"{root}v1/models", f"/api{root}/v1/models", f"{root}{root}/v1/models", f"/health{root}/v1/models"}  # fmt: skip
    targets = sorted(target for target in spelt if target.startswith("/"))
    state = guarded(root_path=root)
    found = asyncio.run(over(state, [request(target) for target in targets]))
    for target, answer in zip(targets, found, strict=True):
        assert status_of(answer) in (400, 401), target

    async def go() -> None:
        raw = Raw(state)
        for target in targets:
            assert await raw("GET", target, "http", root) == 401, target

    asyncio.run(go())
    (with_key,) = asyncio.run(over(state, [request("/v1/models", "Authorization: Bearer k")]))
    if root in ("", "/api", "/health", "/v1"):
        assert status_of(with_key) == 200


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Original-URL: /health"], ["X-Rewrite-URL: /health"], ["X-Forwarded-Prefix: /health"], ["X-Forwarded-Path: /health"],
        ["X-HTTP-Method-Override: OPTIONS"], ["Authorization: Bearer", "Authorization: Bearer k"],
        ["Authorization: Bearer x", "x-api-key: k"], ["Authorization: Bearer \tx"], ["Authorization:"], ["x-api-key:"],
        ["Authorization: Bearer k\x00"], ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"],
        ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"], ["Cookie: Authorization=Bearer k"],
    ],
)  # fmt: skip
def test_no_header_stands_for_the_key(headers: list[str]):
    (answer,) = asyncio.run(over(guarded(), [request("/v1/models", *headers)]))
    assert status_of(answer) in (400, 401)


def test_a_websocket_is_closed():
    for path in ("/v1/realtime", "/v1/models", "/nothing"):
        told = asyncio.run(Raw(guarded())("GET", path, "websocket"))
        assert told == {"type": "websocket.close", "code": 1008, "reason": "Unauthorized"}


def test_unknown_methods_create_no_metric_labels():
    state = guarded()
    odd = [f"GET{number}" for number in range(50)] + ["FOO", "get", "P\x01", "X" * 300]
    sent = [f"{method} /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" for method in odd]
    sent += [request(f"/v1/{number}") for number in range(50)]
    sent += [request(f"/v1/models/{number}", "Authorization: Bearer k") for number in range(50)]
    found = asyncio.run(over(state, sent))
    assert {status_of(answer) for answer in found[: len(odd)]} == {400}
    text = state.metrics.render().decode()
    labels = set(re.findall(r'^http_requests_total\{handler="(.*?)",method="(.*?)"', text, re.M))
    assert labels == {("none", "GET"), ("/v1/models/{name}", "GET")}


def test_every_key_is_compared_also_after_a_match(monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(api_keys, "hmac", SimpleNamespace(compare_digest=compare))
    found = ApiKeys(ServerConfig(api_key=["first", "second", "third"]))
    for key in (b"first", b"third", b"none", b"fir", b"first" * 1000):
        compared.clear()
        assert (found.find(key) is not None) == (key in (b"first", b"third"))
        assert len(compared) == 3
        assert {len(one) for pair in compared for one in pair} == {
            32
        }  # of digests: lengths tell nothing


def test_tenants_are_isolated(tmp_path: Path):
    keys = {"a": "ka", "b": "kb"}
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": name, "key": key} for name, key in keys.items()]))
    life = {"state": "decode", "finish": None, "prompt": 7, "hit": 4, "computed": 9, "output": 3, "limit": 5, "preemptions": 0,
            "blocks": 2, "phases": [["queued", 9.0, 0]], "ended": -1}  # fmt: skip
    lives = [life | {"n": at, "id": f"secret-{name}", "tenant": name} for at, name in enumerate(keys)]  # fmt: skip

    class Watched(ScriptedEngine):
        async def call(self, name: str, *args: Any) -> Any:
            if name == "live":
                return {"lives": lives, "steps": [], "memory": {}, "cost_ms": 0.1}
            return {"tenant": "a", "prompt": [115, 101], "prompt_left": 0, "output": [], "output_left": 0}  # fmt: skip

    state = make_state(Watched("x"), api_key_file=str(file))
    for name, key in keys.items():
        headers = {"Authorization": f"Bearer {key}"}
        told = ask(None, "GET", "/ui/state", headers=headers, state=state)
        assert [one["id"] for one in told.json()["lives"]] == [f"secret-{one}" if one == name else "" for one in keys]  # fmt: skip
        assert told.text.count("secret") == 1
        words = ask(None, "GET", "/ui/words?n=0", headers=headers, state=state)
        assert (words.status_code == 200) == (name == "a")
        ask(None, "POST", "/v1/completions", {"prompt": "same"}, headers, state)
    assert [asked.tenant for asked in state.engine.asked] == ["a", "b"]  # type: ignore[union-attr]


BODY = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "tokens": [1], "max_tokens": 2}  # fmt: skip


def test_a_page_of_another_site_can_send_nothing_and_read_nothing():
    """Only JSON is taken, which a browser asks for leave to send; without --allowed-origins there is no leave."""
    engine = ScriptedEngine("x")
    state = make_state(engine)
    state.dev_mode = True
    origin = {"Origin": "https://evil.example"}

    async def go() -> None:
        async with browser(state, headers=origin) as client:
            for kinds, path, _ in ROWS:
                path = re.sub(r"\{\w+(:path)?\}", "x", path)
                if "POST" in kinds and path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                                                "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/invocations", "/collective_rpc"):  # fmt: skip
                    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain;application/json", ""):  # fmt: skip
                        answer = await client.post(path, content=json.dumps(BODY), headers={"Content-Type": kind})  # fmt: skip
                        assert answer.status_code == 400, (path, kind)
                        assert "access-control-allow-origin" not in answer.headers
                asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}  # fmt: skip
                answer = await client.options(path, headers=asks)
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert answer.status_code == 405

    asyncio.run(go())
    assert engine.asked == []
    assert engine.called == []


# -- a real connection ----------------------------------------------------------------------------
def request(target: str, *headers: str) -> str:
    lines = [f"GET {target} HTTP/1.1", "Host: x", "Connection: close", *headers]
    return "\r\n".join(lines) + "\r\n\r\n"


async def over(state: ServerState, requests: list[str]) -> list[bytes]:
    """Answers of a real server, each on a connection of its own."""
    server = ServerConfig(host="127.0.0.1", port=0, root_path=state.config.server.root_path)
    with sockets.bind(server) as listener:
        http = sockets.http_server(build_app(state), server)
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.01)
        address = listener.getsockname()

        async def one(text: str) -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(text.encode("latin-1"))
            try:
                return await asyncio.wait_for(reader.read(), 60)
            finally:
                writer.close()

        found = [await one(text) for text in requests]
        http.should_exit = True
        await serving
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]
