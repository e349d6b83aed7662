"""Requests of a few bytes with answers of gigabytes, and clients that never read answers (H3)."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from attacked_server import TEXT, AttackedServer, note, together
from test_request_attack import outcome

REFUSED: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt": ["word " * 900] * 1024, "max_tokens": 1, "prompt_logprobs": 20},
    "a quarter": {"prompt": ["word " * 900] * 256, "max_tokens": 1, "prompt_logprobs": 20},
    "logprobs": {"prompt": ["hi"] * 32, "n": 128, "max_tokens": 200, "logprobs": 20, "ignore_eos": True},
    "echo": {"prompt": ["word " * 900] * 32, "n": 128, "max_tokens": 1, "logprobs": 20, "echo": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_of_gigabytes_is_refused(server: AttackedServer, name: str):
    with server.attack(seconds=60) as measured:
        answer = server.ask(TEXT, REFUSED[name])
        assert answer.status_code == 400, answer.text[:300]
        note(answer.text[:300])
    measured.check()


@pytest.mark.attack
def test_beams_of_long_prompts_are_bounded(server: AttackedServer):
    search = {"prompt": ["word " * 900] * 16, "n": 128, "use_beam_search": True, "max_tokens": 30}
    with server.attack(seconds=200) as measured:
        begun = time.monotonic()
        note(f"{outcome(server, TEXT, search, 190)} after {time.monotonic() - begun:.0f} s")
    measured.check()


UNREAD: dict[str, dict[str, Any]] = {
    "prompts": {"prompt": ["word " * 900] * 8, "max_tokens": 1, "prompt_logprobs": 20},
    "samples": {"prompt": "hi", "n": 64, "max_tokens": 200, "logprobs": 20, "ignore_eos": True, "temperature": 1},
    "stream": {"prompt": "hi", "n": 16, "max_tokens": 1500, "logprobs": 20, "ignore_eos": True, "temperature": 1, "stream": True},
}  # fmt: skip
"""Answers of several MiB, which no socket's buffer takes, and which six clients get within two minutes."""
LARGE: dict[str, dict[str, Any]] = {
    "prompts": {"prompt": ["word " * 900] * 40, "max_tokens": 1, "prompt_logprobs": 20},
    "samples": {"prompt": "hi", "n": 64, "max_tokens": 200, "logprobs": 20, "ignore_eos": True, "temperature": 1},
}  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize("name", UNREAD)
def test_unread_answers_use_bounded_memory(server: AttackedServer, name: str):
    """The clients read nothing. The server ends each answer after --send-timeout."""
    raw = json.dumps(UNREAD[name]).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with server.attack(seconds=480) as measured, contextlib.ExitStack() as stack:
        for _ in range(6):
            own = stack.enter_context(server.connection())
            own.sendall(head.encode() + raw)
        end = time.monotonic() + 300
        time.sleep(3)
        while time.monotonic() < end and server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):  # fmt: skip
            time.sleep(1)
        assert time.monotonic() < end, "they still run"
        begun, end = time.monotonic(), time.monotonic() + 120  # --send-timeout is 60
        while time.monotonic() < end and server.client.get("/load").json() != {"server_load": 0}:
            time.sleep(1)
        note(f"given up after {time.monotonic() - begun:.0f} s")
        assert time.monotonic() < end, "they are still held"
    measured.check()


@pytest.mark.attack
@pytest.mark.parametrize("name", ["prompts", "samples"])
def test_large_answers_do_not_delay_other_requests(server: AttackedServer, name: str):
    with server.attack(seconds=280) as measured:
        statuses = together(3, lambda _: outcome(server, TEXT, LARGE[name], 250), 260)
        note(f"{statuses}")
    assert set(statuses) <= {200, 400}, statuses
    measured.check()
