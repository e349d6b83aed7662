"""`--nnodes 2` on two machines, which are network namespaces: over a cable that loses packets, and one that is cut."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from network_cable import NetworkCable, usable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not usable(), reason="needs root and /dev/net/tun"),
]

MODEL = "quire-tiny"
SOURCE = str(Path(__file__).parents[2] / "src")
LIMIT_S = 200
BODY = {"model": MODEL, "prompt": ["The quick brown fox", "1 2 3"], "max_tokens": 16, "logprobs": 3, "temperature": 0}  # fmt: skip


class Served:
    """`quire serve` at a Unix socket, which namespaces of networks do not separate."""

    def __init__(
        self, folder: Path, *flags: str, before: list[str] | None = None, **environment: str
    ):
        self.log, self.socket = folder / "log", folder / "socket"
        folder.mkdir()
        words = [sys.executable, "-m", "quire", "serve", MODEL, "--max-model-len", "512", *flags]
        if "--headless" not in flags:
            words += ["--uds", str(self.socket)]
        env = {**os.environ, "PYTHONPATH": SOURCE, **environment}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*(before or []), *words], stdout=out, stderr=out, env=env
            )
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self.client = httpx.Client(transport=transport, base_url="http://quire", timeout=LIMIT_S)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            finally:
                self.process.kill()
                self.process.wait()

    def ready(self) -> int:
        """The status of /health/ready; 0: nothing answers."""
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)):
                return 0
        return self.client.get("/health/ready").status_code

    def until_ready(self) -> None:
        until = time.monotonic() + LIMIT_S
        while self.ready() != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def choices(self) -> Any:
        answer = self.client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process answers."""
    with Served(tmp_path_factory.mktemp("one") / "server") as server:
        server.until_ready()
        return server.choices()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    return {"QUIRE_CLUSTER_KEY_FILE": str(key)}


def pair(
    cable: NetworkCable, folder: Path, environment: dict[str, str], *flags: str
) -> list[Served]:
    """The head and the other machine."""
    common = [*flags, "--nnodes", "2", "--master-addr", cable.addresses[0]]
    head = Served(folder / "head", *common, before=cable.on(0), **environment)
    more = ["--node-rank", "1", "--headless"]
    return [head, Served(folder / "node", *common, *more, before=cable.on(1), **environment)]


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-tp", "2", "-pp", "2")], ids=" ".join)
def test_a_cable_that_delays_and_loses_packets_changes_no_token(
    tmp_path: Path, environment: dict[str, str], wanted: Any, flags: tuple[str, ...]
) -> None:
    with NetworkCable() as cable:
        cable.delay_s, cable.loss = 0.001, 0.02
        head, node = pair(cable, tmp_path, environment, *flags)
        with head, node:
            head.until_ready()
            assert head.choices() == wanted
            assert cable.dropped > 10
            head.process.send_signal(signal.SIGTERM)
            assert head.process.wait(LIMIT_S) == 0, head.log.read_text()
            assert node.process.wait(LIMIT_S) == 0, node.log.read_text()
        assert [cable.pids(0), cable.pids(1)] == [[], []]


def test_a_cable_that_is_cut_ends_the_request_and_the_machines_meet_again(
    tmp_path: Path, environment: dict[str, str], wanted: Any
) -> None:
    with NetworkCable() as cable:
        head, node = pair(cable, tmp_path, environment, "-tp", "2")
        with head, node:
            head.until_ready()
            assert head.choices() == wanted
            cable.delay_s = 0.005  # the request lasts
            body = BODY | {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with head.client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                cable.switch(1, "down")
                began, rest = time.monotonic(), list(lines)
            assert time.monotonic() - began < 60
            assert any('"error"' in line for line in rest), rest[-3:]
            assert head.ready() == 503
            cable.switch(1, "up")
            cable.delay_s = 0.0
            head.until_ready()
            assert head.choices() == wanted
            assert "is gone: waiting" in node.log.read_text()
            head.process.send_signal(signal.SIGTERM)
            assert head.process.wait(LIMIT_S) == 0, head.log.read_text()
            assert node.process.wait(LIMIT_S) == 0, node.log.read_text()
        assert [cable.pids(0), cable.pids(1)] == [[], []]
