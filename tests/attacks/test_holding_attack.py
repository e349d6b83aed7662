"""Defences that the security review found working, which must stay: keys, paths, heads, schemas, bodies at their
limits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from typing import Any

import pytest
from attacked_server import TEXT, AttackedServer
from conftest import Start

from quire.server.app import DEV_ROUTES, ROUTES, UI_ROUTES
from quire.server.middleware import OPEN

METHODS = (
    "GET",
    "POST",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "PROPFIND",
    "CONNECT",
)
KEY = "k-of-the-attacks"


def status(server: AttackedServer, head: bytes) -> int:
    """The status of the first answer; 0: the connection was closed without one."""
    with server.connection(timeout=10) as own:
        own.sendall(head)
        with contextlib.suppress(ConnectionError):
            line = own.recv(4096).split(b" ", 2)
            return int(line[1]) if len(line) > 1 else 0
    return 0


def spellings(path: str) -> list[str]:
    """Spellings of a path that a proxy, a router and the key check may read differently."""
    tail = path.lstrip("/")
    return [
        f"//{tail}", f"/./{tail}", f"/health/../{tail}", f"/health/..%2f{tail}", f"/health%2f..%2f{tail}", f"/{tail}/", f"/{tail};/health",
        f"/{tail}%00", f"/{tail}%20", f"/%2e/{tail}", f"/\\{tail}", f"\\{tail}", f"/{tail.upper()}", f"/{tail}?/health", f"/{tail}#/health",
        f"http://a/{tail}", f"http://a/health/../{tail}", f"/health;/../{tail}", f"/health%00/../{tail}", f"/metrics/..;/{tail}", f"/ping//..//{tail}",
        "/" + "".join(f"%{ord(letter):02x}" for letter in tail),
    ]  # fmt: skip


@pytest.mark.attack
def test_only_the_open_paths_answer_without_the_key(started: Start):
    """All methods and paths, many spellings, and headers that some proxies trust."""
    server = started("--api-key", KEY, env={"QUIRE_SERVER_DEV_MODE": "1"}, key=KEY)
    paths = sorted({path for _, path, _ in ROUTES + UI_ROUTES + DEV_ROUTES} - OPEN)
    assert len(paths) >= 25
    seen = 0
    with server.attack(seconds=100) as measured:
        for method, path in itertools.product(METHODS, paths):
            seen += 1
            found = status(server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())  # fmt: skip
            refused = (0, 400, 401, 405) if method == "OPTIONS" else (0, 400, 401)
            assert found in refused, (method, path, found)
        for path in paths:
            for spelt in spellings(path):
                seen += 1
                found = status(server, f"GET {spelt} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert found in (0, 400, 401, 404), (spelt, found)
        believed = ("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health", "X-Forwarded-For: 127.0.0.1",
                    "Authorization: Bearer", "Authorization: Bearer \r\nAuthorization: Bearer x", "x-api-key:", "Authorization: Basic " + KEY,
                    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13")  # fmt: skip
        for more in believed:
            found = status(
                server, f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{more}\r\n\r\n".encode()
            )
            assert found in (400, 401), (more, found)
        good = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        assert status(server, good.encode()) == 200
    assert seen > 800
    measured.check()


SMUGGLED = {
    "CL and TE": b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two CL": b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "an odd TE": b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "obs-fold": b"GET %s HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "space before colon": b"GET %s HTTP/1.1\r\nHost : a\r\n\r\n",
    "NUL": b"GET %s HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
    "signed CL": b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nabcde",
    "control character": b"GET %s HTTP/1.1\r\nHost: localhost\r\nX: a\x01b\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_ambiguous_framing_is_refused(server: AttackedServer, name: str):
    assert status(server, SMUGGLED[name] % b"/v1/models") == 400


def doubling(depth: int) -> dict[str, Any]:
    """A schema of size 2^depth, if every reference is expanded."""
    parts = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "null"}}}


SCHEMAS: dict[str, Any] = {
    "a loop": {"$ref": "#"},
    "two loops": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "doubling": doubling(25),
    "products": {"allOf": [{"anyOf": [{"minimum": number}, {"maximum": -number}]} for number in range(20)]},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "a long text": {"type": "string", "minLength": 10**9},
    "a remote one": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "no type": {"type": "nonsense"},
    "wrong types": {"type": ["a", 1, None], "properties": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_accepted_or_refused_quickly(server: AttackedServer, name: str):
    body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": SCHEMAS[name]}}
    assert server.ask(TEXT, body, timeout=30).status_code in (200, 400)


BODIES = {
    "open lists": b'{"prompt":' + b"[" * (8 << 20),
    "closed lists": b'{"prompt":"a","vllm_xargs":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "a long number": b'{"prompt":"a","max_tokens":1,"seed":' + b"9" * 100_000 + b"}",
    "an exponent": b'{"prompt":"a","max_tokens":1,"temperature":1e999999999}',
    "a lone surrogate": b'{"prompt":"\\ud800","max_tokens":1}',
    "no UTF-8": b'{"prompt":"\xff\xfe","max_tokens":1}',
}


@pytest.mark.parametrize("name", BODIES)
def test_odd_json_uses_little_time_and_memory(server: AttackedServer, name: str):
    assert server.ask(TEXT, BODIES[name], timeout=30).status_code in (200, 400)


def test_one_byte_more_than_a_body_may_have(server: AttackedServer):
    with server.connection() as own:
        own.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 16777217\r\n\r\n{")  # fmt: skip
        own.settimeout(10)
        assert own.recv(4096).startswith(b"HTTP/1.1 413")
    assert json.loads(server.innocent())


@pytest.mark.attack
def test_disconnected_clients_free_their_resources(server: AttackedServer):
    """Forty streams and forty whole answers, disconnected in the middle."""
    with server.attack(seconds=100) as measured:
        for number in range(80):
            body = json.dumps({"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": number % 2 == 0}).encode()  # fmt: skip
            own = server.connection()
            own.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)  # fmt: skip
            if number % 4 == 0:
                own.settimeout(10)
                own.recv(100)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            own.close()
        server.until_quiet(60)
    measured.check()
