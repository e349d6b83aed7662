"""Requests that block the event loop or the text threads, or wait for an answer forever (H4, H5, H6, H7, M3, L2)."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from attacked_server import CHAT, TEXT, AttackedServer, note, rss_mib, together
from conftest import Start

MIB = 1 << 20
ANSWERED_S = 30.0


def unknown_fields(size: int) -> bytes:
    """Names with the letters of a known one in another order: comparing them takes long."""
    words, taken = [], 0
    for letters in itertools.permutations("max_completion_tokens"):
        word = "".join(letters)
        words.append(f'"{word}":1')
        taken += len(word) + 5
        if taken > size:
            break
    return ('{"prompt":"a","max_tokens":1,' + ",".join(words) + "}").encode()


def near_misses(size: int) -> bytes:
    words = ",".join(f'"max_token{number}":1' for number in range(size // 20))
    return ('{"prompt":"a","max_tokens":1,' + words + "}").encode()


def completion(**more: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | more).encode()


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | more).encode()  # fmt: skip


BODIES: dict[str, tuple[str, Any]] = {
    "unknown fields": (TEXT, lambda: unknown_fields(4 * MIB)),
    "near misses": (TEXT, lambda: near_misses(2 * MIB)),
    "a bad word": (TEXT, lambda: completion(bad_words=["a b" * (8 * MIB // 3)])),
    "a stop string": (TEXT, lambda: completion(stop=["ab" * (2 * MIB)], n=8, temperature=1)),
    "template arguments": (CHAT, lambda: chat(chat_template_kwargs={"a": [["x"] * 9] * (12 * MIB // 60)})),
    "many prompts": (TEXT, lambda: completion(prompt=["word " * 1400] * 1024)),
    "many messages": (CHAT, lambda: b'{"max_tokens":1,"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 530_000) + b"]}"),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": [65, 66, 67] * (16 * MIB // 13)}).encode()),
    "allowed ids": (TEXT, lambda: b'{"prompt":"a","max_tokens":1,"n":4,"temperature":1,"allowed_token_ids":[' + b",".join([b"5"] * 7_000_000) + b"]}"),
    "a long prompt": (TEXT, lambda: completion(prompt="word " * (15 * MIB // 5))),
    "a long text without spaces": (TEXT, lambda: completion(prompt="a" * (15 * MIB))),
    "deep JSON": (TEXT, lambda: b'{"prompt":"a","vllm_xargs":{"a":' + b"[" * (8 * MIB)),
    "empty lists": (TEXT, lambda: b'{"prompt":"a","max_tokens":1,"vllm_xargs":{"a":[' + b",".join([b"[]"] * (15 * MIB // 3)) + b"]}}"),
    "a large argument": (TEXT, lambda: completion(vllm_xargs={"a": "x" * (15 * MIB)}, n=64, temperature=1)),
    "a large bias": (TEXT, lambda: completion(logit_bias={str(number): 1 for number in range(60_000)}, n=64, temperature=1)),
    "many tools": (CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": {f"p{number}": {"type": "string"}}}}} for number in range(1000)])),
    "large tools": (CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": "f", "description": "x" * (14 * MIB), "parameters": {}}}])),
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("name", BODIES)
def test_no_body_blocks_the_event_loop(server: AttackedServer, name: str):
    path, make = BODIES[name]
    raw = make()
    with server.attack(seconds=150) as measured:
        begun = time.monotonic()
        statuses = together(4, lambda _: outcome(server, path, raw), 140)
        note(f"{statuses} after {time.monotonic() - begun:.1f} s")
    assert all(status in (200, 400, 413, 429, 503) for status in statuses), statuses
    measured.check(probe_s=1.0)


def outcome(server: AttackedServer, path: str, body: Any, timeout: float = 120) -> int | str:
    """The status, on a new connection; or what came instead of one."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Content-Type": "application/json", **dict(server.client.headers)}
    try:
        return httpx.post(server.url + path, content=raw, headers=head, timeout=timeout).status_code
    except httpx.HTTPError as error:
        return type(error).__name__


@pytest.mark.attack
def test_eight_bodies_do_not_end_several_http_processes(started: Start):
    server = started("--api-server-count", "2")
    raw = unknown_fields(4 * MIB)
    with server.attack(seconds=150) as measured:
        statuses = together(8, lambda _: outcome(server, TEXT, raw), 140)
        note(f"{statuses}")
    assert all(status in (200, 400, 429, 503) for status in statuses), statuses
    measured.check()


def test_unknown_fields_are_looked_at_in_a_bounded_number(server: AttackedServer):
    raw = unknown_fields(MIB)
    with server.attack(seconds=60) as measured:
        assert server.ask(TEXT, raw).status_code in (200, 400)
    measured.check()


@pytest.mark.attack
def test_concurrent_long_texts_do_not_use_all_threads(server: AttackedServer):
    """Regression: structured requests need a thread too, and waited for one of six that all counted tokens."""
    raw = json.dumps({"prompt": "many words " * (8 * MIB // 11)}).encode()
    regex = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "ab+"}}
    with server.attack(seconds=150) as measured:
        took: list[float] = []

        def innocent(_: int) -> None:
            for _ in range(4):
                time.sleep(0.7)
                begun = time.monotonic()
                assert server.ask(TEXT, regex).status_code == 200
                took.append(time.monotonic() - begun)

        thread = threading.Thread(target=innocent, args=(0,))
        thread.start()
        statuses = together(12, lambda _: outcome(server, "/tokenize", raw), 140)
        thread.join()
        note(f"{statuses}; a structured request took at most {max(took):.1f} s")
    measured.check()
    assert len(took) == 4
    assert max(took) < 4


HANGS: list[dict[str, Any]] = [
    {"best_of": 2, "temperature": 1, "logprob_token_ids": [1, 2, 3]},
    {"best_of": 3, "n": 2, "temperature": 1, "logprob_token_ids": [1]},
]


def test_no_request_that_the_engine_cannot_read_hangs(server: AttackedServer):
    with server.attack(seconds=60) as measured:
        for more in HANGS:
            answer = server.ask(TEXT, {"prompt": "hi", "max_tokens": 4} | more, 15)
            assert answer.status_code in (200, 400)
    measured.check()


@pytest.mark.slow
def test_a_refusal_does_not_repeat_the_request(started: Start):
    """An integer that msgpack cannot encode; then the engine is killed."""
    server = started()
    huge = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"a": 10**35}}
    assert server.ask(TEXT, huge).status_code == 400
    server.signal_engine(signal.SIGKILL)
    assert healed(server)


def healed(server: AttackedServer, seconds: float = 60) -> bool:
    """Whether a normal request is answered again, with the same tokens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if server.innocent() == server.expected:
                return True
        except (AssertionError, httpx.HTTPError):
            time.sleep(0.3)
    return False


@pytest.mark.slow
@pytest.mark.attack
def test_refused_requests_leave_no_memory(server: AttackedServer):
    pid = server.process.pid
    raw = b'{"prompt":"a","max_tokens":1,"vllm_xargs":{"b":' + b"9" * 35 + b',"a":"' + b"x" * (12 * MIB) + b'"}}'  # fmt: skip
    with server.attack(seconds=120) as measured:
        assert server.ask(TEXT, raw).status_code == 400
        before = rss_mib(pid)
        statuses = [server.ask(TEXT, raw).status_code for _ in range(20)]
        note(f"{before:.0f} MiB -> {rss_mib(pid):.0f} MiB after 20 refused")
        assert set(statuses) == {400}
        assert rss_mib(pid) - before < 60
    measured.check()


@pytest.mark.slow
def test_client_errors_are_not_server_errors(server: AttackedServer):
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
        {"structured_outputs": {"regex": '("a"){1000000}'}},
        {"structured_outputs": {"grammar": 'root ::= ("a"){1000000}'}},
        {"use_beam_search": True, "n": 2, "length_penalty": -1e308},
        {"use_beam_search": True, "n": 2, "length_penalty": 1e308},
    ]  # fmt: skip
    with server.attack(seconds=60) as measured:
        for more in bodies:
            answer = server.ask(TEXT, {"prompt": "a", "max_tokens": 3} | more)
            assert answer.status_code in (200, 400), (more, answer.text)
    measured.check()


@pytest.mark.attack
def test_key_limits_are_checked_before_text_is_parsed(started: Start, tmp_path: Any):
    """Regression: refusing twelve MiB of text took five seconds of a core each time."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: a, key: sk-a, requests_per_minute: 2, max_concurrency: 1, tokens_per_minute: 100}\n- {name: b, key: sk-b}\n")  # fmt: skip
    server = started("--api-key-file", str(keys), key="sk-b")
    raw = completion(prompt="word " * (12 * MIB // 5))
    mine = {"Authorization": "Bearer sk-a", "Content-Type": "application/json"}
    with server.attack(seconds=120) as measured:
        many = {"prompt": ["a"] * 1024, "n": 4, "max_tokens": 1, "temperature": 1}
        answer = httpx.post(server.url + TEXT, json=many, headers=mine, timeout=60)
        assert answer.status_code in (400, 429)
        begun = time.monotonic()
        statuses = [httpx.post(server.url + path, content=raw, headers=mine, timeout=60).status_code for path in (TEXT, "/tokenize") * 5]  # fmt: skip
        took = time.monotonic() - begun
        note(f"{statuses} in {took:.1f} s")
        assert 429 in statuses
        assert took < 10
    measured.check()
