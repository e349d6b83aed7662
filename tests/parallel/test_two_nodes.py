"""A model split between two machines, here two addresses: `LLM` is the head, `quire serve --headless` the other machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, StartupError

MODEL = "quire-tiny"
PROMPTS = ["The quick brown fox", "1 2 3 4 5", "def add(a, b):"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, n=2),
    SamplingParams(temperature=0.0, max_tokens=12),
]
HEAD = "127.0.0.1"
LIMIT_S = 120


def free_port() -> int:
    with socket.create_server((HEAD, 0)) as found:
        return int(found.getsockname()[1])


TENSOR_2 = {"tensor_parallel_size": 2}
LAYOUTS = {
    "tp 2": TENSOR_2,
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 4": {"tensor_parallel_size": 4},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp 2, pcp 2": {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
}


def start_node(
    port: int, log: Path, *flags: str, sizes: dict[str, int] = TENSOR_2, **environment: str
) -> subprocess.Popen[bytes]:
    own = {"QUIRE_HOST_IP": "127.0.0.2", "QUIRE_NODES_TIMEOUT_S": "40", **environment}
    command = [
        *(sys.executable, "-m", "quire.cli.main", "serve", MODEL, "--max-model-len", "256"),
        *(f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()),
        *("--nnodes", "2", "--node-rank", "1", "--headless"),
        *("--master-addr", HEAD, "--master-port", str(port), *flags),
    ]
    with log.open("wb") as out:
        return subprocess.Popen(command, stderr=out, stdout=out, env={**os.environ, **own})


def head(port: int, sizes: dict[str, int] = TENSOR_2) -> LLM:
    settings = {"nnodes": 2, "master_addr": HEAD, "master_port": port}
    return LLM(MODEL, max_model_len=256, **settings, **sizes)


def answers(llm: LLM) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, request.prompt_logprobs)
        for request in llm.generate(PROMPTS, PARAMS)
        for one in request.outputs
    ]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    """The answers of one process."""
    with LLM(MODEL, max_model_len=256) as whole:
        return answers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_tokens_and_logprobs_are_those_of_one_process(
    tmp_path: Path, sizes: dict[str, int], wanted: list[Any]
) -> None:
    node = start_node(port := free_port(), log := tmp_path / "log", sizes=sizes)
    try:
        llm = head(port, sizes)
        found = answers(llm)
        llm.shutdown()
        assert node.wait(LIMIT_S) == 0, log.read_text()
    finally:
        node.kill()
        node.wait()
    assert found == wanted


@pytest.mark.slow
def test_a_node_that_is_killed_and_a_head_that_is_gone(tmp_path: Path) -> None:
    node = start_node(port := free_port(), log := tmp_path / "log", QUIRE_NODES_TIMEOUT_S="1")
    try:
        while "waiting" not in (text := log.read_text()) and node.poll() is None:
            time.sleep(0.05)
        assert node.wait(LIMIT_S) == 1
        assert f"could not connect to {HEAD}:{port} within" in (text or log.read_text())
    finally:
        node.kill()
        node.wait()
    node = start_node(port, log)
    try:
        llm = head(port)
        node.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"on node 1 \(127\.0\.0\.2\) has ended"):
            llm.generate(PROMPTS, PARAMS[2])
        assert time.monotonic() - began < 30
        llm.shutdown()
    finally:
        node.kill()
        node.wait()


@pytest.mark.slow
def test_other_flags_and_variables_on_one_machine(tmp_path: Path) -> None:
    log = tmp_path / "log"
    node = start_node(port := free_port(), log, "--dtype", "float32", QUIRE_CPU_ISA="portable")
    try:
        with pytest.raises(StartupError, match=r"node 1 at 127\.0\.0\.2 differs") as caught:
            head(port)
        assert node.wait(LIMIT_S) == 1
    finally:
        node.kill()
        node.wait()
    for text in (str(caught.value), log.read_text()):
        assert "--dtype is float32 there and auto here" in text
        assert "QUIRE_CPU_ISA is portable there and auto here" in text


def test_numbers_that_do_not_fit_are_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match=r"nnodes=3 .* 2 ranks.*use 2"):
        LLM(MODEL, tensor_parallel_size=2, nnodes=3)
    with pytest.raises(ConfigError, match=r"node_rank=2 .* nnodes=2"):
        LLM(MODEL, tensor_parallel_size=2, nnodes=2, node_rank=2)
    with pytest.raises(ConfigError, match=r"node_rank=1 .* quire serve .*--headless"):
        LLM(MODEL, tensor_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(
        ConfigError, match=r"nnodes=3 with data_parallel_size=2 and 1 ranks .*use 2"
    ):
        LLM(MODEL, data_parallel_size=2, nnodes=3)
    with pytest.raises(ConfigError, match=r"10\.255\.255\.254, which needs a key"):
        LLM(MODEL, tensor_parallel_size=2, nnodes=2, master_addr="10.255.255.254")
