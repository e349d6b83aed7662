"""A server whose model ranks split: one rank is killed or stopped, and SIGTERM while requests run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from attacked_server import TEXT, AttackedServer, note
from conftest import Start
from server_process import family
from test_request_attack import healed

LONG = {"prompt": "a tale", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def ranks_of(server: AttackedServer) -> list[int]:
    """The processes of the ranks, in their order."""
    found = []
    for pid in family(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text()
        if "quire.executor.worker_main" in words:
            found.append(pid)
    return sorted(found)


def gone(pids: list[int], seconds: float = 20) -> list[int]:
    """Those that still exist after a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def in_threads(server: AttackedServer, count: int) -> tuple[list[threading.Thread], list[str]]:
    """Long requests, and what they are answered."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(server.ask(TEXT, LONG, 240).text)
        except httpx.HTTPError as error:
            answers.append(repr(error))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, answers


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_replaced_with_its_group(started: Start, number: int, rank: int):
    """No answer is lost: new ranks go on where the old ones ended."""
    server = started("--tensor-parallel-size", "2")
    first = ranks_of(server)
    assert len(first) == 2
    shared = set(os.listdir("/dev/shm"))
    threads, answers = in_threads(server, 4)
    time.sleep(2.0)
    began = time.monotonic()
    os.kill(first[rank], number)
    statuses = []
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() - began < 240, "a request is not answered"
        statuses.append(server.client.get("/health/ready").status_code)
        time.sleep(0.1)
    note(f"answered {time.monotonic() - began:.1f} s after signal {number} to rank {rank}")
    texts = {json.loads(text)["choices"][0]["text"] for text in answers}
    lengths = [json.loads(text)["usage"]["completion_tokens"] for text in answers]
    assert (len(texts), lengths) == (1, [LONG["max_tokens"]] * 4)  # the next ranks go on with them
    assert healed(server, 120), server.output[-3000:]
    assert server.client.get("/health/ready").status_code == 200
    assert 503 in statuses or number == signal.SIGKILL
    assert not gone(first)
    second = ranks_of(server)
    assert len(second) == 2
    assert not set(os.listdir("/dev/shm")) - shared
    server.stop(signal.SIGTERM)
    assert not gone(second)


@pytest.mark.attack
def test_sigterm_drains_all_ranks(started: Start):
    server = started("--tensor-parallel-size", "2", "--shutdown-timeout", "240")
    pids = family(server.process.pid)
    threads, answers = in_threads(server, 2)
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(240)
    assert ['"finish_reason":"length"' in text.replace(" ", "") for text in answers] == [True, True]
    assert server.process.wait(240) == 0
    assert not gone(pids)
