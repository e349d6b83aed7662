"""`--nnodes` with several engines, each machine with an address of its own on this one: whole engines on each machine, and
engines of which each has two machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import PATIENCE_S, SOURCE, Served, until

MODEL = "quire-tiny"
COMMON = ["--max-model-len", "256", "--max-num-seqs", "4", "--master-addr", "127.0.0.1"]
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 2}  # fmt: skip


def free_ports() -> int:
    """The first of two free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


class OtherMachine:
    def __init__(self, number: int, log: Path, *flags: str):
        words = [sys.executable, "-m", "quire", "serve", MODEL, "--headless", "--node-rank", str(number), *COMMON, *flags,
                 "--kv-cache-memory-bytes", "4M", "--dtype", "float32"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": SOURCE, "QUIRE_HOST_IP": f"127.0.0.{number + 1}"}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(words, env=env, stdout=out, stderr=out)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def answer(server: Served, rank: str = "any") -> Any:
    found = server.client.post("/v1/completions", json=BODY, headers={"X-data-parallel-rank": rank})
    assert found.status_code == 200, found.text
    return found.json()["choices"]


@pytest.fixture(scope="module")
def wanted() -> Any:
    """What one engine on one machine answers."""
    with Served(MODEL, *COMMON) as server:
        return answer(server)


@pytest.mark.slow
def test_each_machine_has_an_engine(tmp_path: Path, wanted: Any) -> None:
    flags = ["-dp", "2", "--nnodes", "2", "-dpp", str(free_ports())]
    node = OtherMachine(1, tmp_path / "log", *flags)
    try:
        with Served(MODEL, *COMMON, *flags) as server:
            assert [answer(server, rank) for rank in ("0", "1")] == [wanted, wanted]
            assert server.stop(signal.SIGTERM) == 0
        assert node.wait() == 0, node.log.read_text()
    finally:
        node.end()


@pytest.mark.slow
@pytest.mark.slow
def test_each_engine_has_two_machines(tmp_path: Path, wanted: Any) -> None:
    """A machine that ends takes its engine with it, and no other; the engine comes again with it."""
    flags = ["-dp", "2", "-tp", "2", "--nnodes", "4", "--master-port", str(free_ports())]
    nodes = [OtherMachine(number, tmp_path / f"log {number}", *flags) for number in (1, 2, 3)]
    try:
        with Served(MODEL, *COMMON, *flags, env={"QUIRE_HOST_IP": "127.0.0.1"}) as server:
            assert [answer(server, rank) for rank in ("0", "1")] == [wanted, wanted]
            nodes[2].end()
            until(
                lambda: server.client.get("/health/ready").status_code == 503
            )  # without a request
            assert answer(server) == wanted
            assert nodes[0].process.poll() is None
            nodes[2] = OtherMachine(3, tmp_path / "log 3", *flags)
            until(lambda: server.client.get("/health/ready").status_code == 200)
            assert [answer(server, rank) for rank in ("0", "1")] == [wanted, wanted]
            assert server.stop(signal.SIGTERM) == 0
        assert [node.wait() for node in nodes] == [0, 0, 0]
    finally:
        for node in nodes:
            node.end()
