"""A server that is killed whole, at any time, finishes its background responses after its restart, equal."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import Served

MODEL, PATH = "quire-tiny", "/v1/responses"
FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "8")
BODIES: list[dict[str, Any]] = [
    {"input": "Once upon a time", "max_output_tokens": 300, "temperature": 0, "ignore_eos": True},
    {"input": "The cat", "max_output_tokens": 300, "temperature": 1.2, "seed": 7, "ignore_eos": True},
    {"input": "The dog", "max_output_tokens": 200, "temperature": 0.9, "seed": 8, "ignore_eos": True, "frequency_penalty": 0.4},
]  # fmt: skip


def ended(server: Served, id: str) -> dict[str, Any]:
    for _ in range(4000):
        answer = server.client.get(f"{PATH}/{id}")
        assert answer.status_code == 200, answer.text
        if (found := dict(answer.json()))["status"] not in ("queued", "in_progress"):
            return found
        time.sleep(0.02)
    raise AssertionError("it has no end")


def said(response: dict[str, Any]) -> Any:
    return response["status"], response["output"][0]["content"], response["usage"]["output_tokens"]


def kill(server: Served) -> None:
    """The whole server: its engine ends with it, or is killed, too."""
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.slow
def test_background_responses_outlive_the_server(tmp_path: Path) -> None:
    flags, rng = (*FLAGS, "--journal-dir", str(tmp_path / "journal")), random.Random(os.getpid())
    ids: list[str] = []
    with Served(MODEL, *flags) as server:
        whole = [ended(server, server.post(PATH, background=True, **body)["id"]) for body in BODIES]
        ids = [server.post(PATH, background=True, **body)["id"] for body in BODIES]
        time.sleep(rng.uniform(0.05, 0.5))
        kill(server)
    with Served(MODEL, *flags) as server:
        time.sleep(rng.uniform(0.0, 0.5))
        kill(server)
    with Served(MODEL, *flags) as server:
        for id, expected in zip(ids, whole, strict=True):
            assert said(ended(server, id)) == said(expected)
            assert "resumed" not in ended(server, id)["usage"]
            assert ended(server, expected["id"]) | {"usage": 0} == expected | {"usage": 0}
            events = server.client.get(f"{PATH}/{id}?stream=true").text
            assert events.count("event: response.completed") + events.count("event: response.incomplete") == 1  # fmt: skip
        assert "background responses of an earlier server were found" in server.output
