"""A server with one engine here and one of a headless node, each with an address of its own on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import SOURCE
from test_data_parallel import BODY, MODEL, Served, asked, children, until

FLAGS = ["-dp", "2", "-dpl", "1", "--max-model-len", "256", "--max-num-seqs", "4"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        return int(one.getsockname()[1])


class HeadlessNode:
    def __init__(self, key: Path, *flags: str):
        words = [sys.executable, "-m", "quire", "serve", MODEL, "--headless", "-dpr", "1", *FLAGS, *flags,
                 "--kv-cache-memory-bytes", "4M", "--dtype", "float32"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": SOURCE, "QUIRE_CLUSTER_KEY_FILE": str(key)}
        self.process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


@pytest.mark.slow
def test_a_node_serves_leaves_comes_again_and_ends_with_the_server(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    link = ["-dpa", "127.0.0.2", "-dpp", str(free_port())]
    nodes = [HeadlessNode(key, *link)]
    env = {"QUIRE_CLUSTER_KEY_FILE": str(key)}
    try:
        with Served(MODEL, *FLAGS, *link, env=env) as server:
            texts = {asked(server, rank=rank).json()["choices"][0]["text"] for rank in ("0", "1")}
            assert len(texts) == 1
            until(lambda: server.metric("vllm:generation_tokens_total", 'engine="1"') >= 24)
            # Another model, or the same engine twice, is refused with the reason.
            strange = HeadlessNode(key, *link, "--max-model-len", "128")
            code, errors = strange.wait()
            assert code == 1
            assert "the largest length (max_model_len) is 128 there and 256 here" in errors
            family = children(nodes[0].process.pid)
            nodes[0].process.send_signal(signal.SIGTERM)
            assert nodes[0].wait()[0] == 0
            assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
            until(lambda: server.client.get("/health/ready").status_code == 503)
            assert server.client.post("/v1/completions", json=BODY).status_code == 200
            nodes.append(HeadlessNode(key, *link))
            until(lambda: server.client.get("/health/ready").status_code == 200)
            assert asked(server, rank="1").status_code == 200
            family = children(server.process.pid)
            assert server.stop(signal.SIGTERM) == 0
            assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
        code, errors = nodes[1].wait()
        assert code == 0
        assert "has ended: this node ends too" in errors
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()


@pytest.mark.slow
@pytest.mark.slow
def test_a_killed_node_and_a_killed_server(tmp_path: Path) -> None:
    """Neither can say goodbye: the other side notices the silence, and no process is left."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    link = ["-dpa", "127.0.0.2", "-dpp", str(free_port())]
    nodes = [HeadlessNode(key, *link)]
    try:
        with Served(MODEL, *FLAGS, *link, env={"QUIRE_CLUSTER_KEY_FILE": str(key)}) as server:
            until(lambda: server.client.get("/health/ready").status_code == 200)
            engines = children(nodes[0].process.pid)
            assert engines
            nodes[0].process.kill()
            nodes[0].wait()
            until(lambda: not [pid for pid in engines if Path(f"/proc/{pid}").exists()])
            until(lambda: server.client.get("/health/ready").status_code == 503)
            assert server.client.post("/v1/completions", json=BODY).status_code == 200
            nodes.append(HeadlessNode(key, *link))
            until(lambda: server.client.get("/health/ready").status_code == 200)
            assert asked(server, rank="1").status_code == 200
            family = children(server.process.pid)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            until(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()])
        code, errors = nodes[1].wait()
        assert code == 1
        assert "nothing was heard from the server at tcp://127.0.0.2:" in errors
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()
