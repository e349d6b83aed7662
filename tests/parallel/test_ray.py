"""Ray starts the ranks, on two nodes of a cluster on this machine: the same outputs as in one process."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, StartupError
from tests.processes.server_process import Served, until

MODEL = "quire-tiny"
PROMPTS = ["The quick brown fox", "1 2 3 4 5"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    SamplingParams(temperature=1.0, seed=7, max_tokens=12, n=2),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each, so that two ranks cannot be on one of them."""
    ray = pytest.importorskip("ray", reason="pip install quire[ray]")
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    found.add_node(num_cpus=1)
    ray.init(address=found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def answers(llm: LLM) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs)
        for request in llm.generate(PROMPTS, PARAMS)
        for one in request.outputs
    ]


def workers_of_ray() -> list[int]:
    """The processes of ranks, which are children of Ray's actors."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            actor = Path("/proc", parent, "cmdline").read_text().startswith("ray::")
            if actor and "quire.executor.worker_main" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def split() -> LLM:
    return LLM(MODEL, max_model_len=256, tensor_parallel_size=2, distributed_executor_backend="ray")


@pytest.mark.slow
def test_two_nodes_give_the_outputs_of_one_process(cluster: Any) -> None:
    llm = split()
    nodes = {member.process.where for member in llm.client.core.executor.members}  # type: ignore[attr-defined]
    found = answers(llm)
    llm.shutdown()
    assert len(nodes) == 2
    whole = LLM(MODEL, max_model_len=256)
    assert found == answers(whole)
    whole.shutdown()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_engine_and_the_next_one_starts(cluster: Any) -> None:
    llm = split()
    os.kill(workers_of_ray()[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"on node \d .* has ended"):
        answers(llm)
    assert time.monotonic() - began < 30
    llm.shutdown()
    again = split()
    assert len(answers(again)) == 3
    again.shutdown()


@pytest.mark.slow
def test_engines_on_the_machines_of_a_cluster(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util import placement_group_table

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # each engine's process joins it
    sizes = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    with LLM(MODEL, max_model_len=256, data_parallel_backend="ray", **sizes) as llm:
        groups = [one for one in placement_group_table().values() if one["state"] == "CREATED"]
        machines = [set(one["bundles_to_node_id"].values()) for one in groups]
        assert sorted(map(len, machines)) == [1, 1]
        assert len(set.union(*machines)) == 2
        found = answers(llm)
    with LLM(MODEL, max_model_len=256) as whole:
        assert found == answers(whole)
    with pytest.raises(StartupError, match="need 3 machines or more, and the Ray cluster has 2"):
        LLM(MODEL, data_parallel_size=3, data_parallel_size_local=1, data_parallel_backend="ray")


@pytest.mark.slow
def test_a_server_outlives_the_head_of_ray() -> None:
    """Requests are answered soon after Ray's head is killed, and the engine starts again when there is a next head."""
    pytest.importorskip("ray", reason="pip install quire[ray]")
    from ray.cluster_utils import Cluster

    def end(nodes: list[Any]) -> None:
        for node in nodes:
            node.kill_all_processes(check_alive=False, allow_graceful=False)

    options = {"num_cpus": 1, "include_dashboard": False}
    first = Cluster(initialize_head=True, head_node_args=options)
    running, second = [first.head_node, first.add_node(num_cpus=1)], None
    flags = "-tp", "2", "--distributed-executor-backend", "ray", "--kv-cache-memory-bytes", "16M"
    answers: list[httpx.Response] = []
    try:
        with Served(MODEL, *flags, env={"RAY_ADDRESS": first.address}) as server:
            body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
            asks = threading.Thread(
                target=lambda: answers.append(server.client.post("/v1/completions", json=body))
            )
            asks.start()
            until(lambda: server.metric("vllm:num_requests_running") == 1)
            end(running[:1])
            asks.join(30)
            assert [answer.status_code for answer in answers] == [500]
            assert re.search(
                r"failure \w+ of the engine: .* on node \d .* has ended", server.output
            )
            assert server.client.get("/health/ready").status_code == 503
            end(running)
            port = int(first.address.rpartition(":")[2])
            second = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 2, "gcs_server_port": port})  # fmt: skip
            until(lambda: server.client.get("/health/ready").status_code == 200)
            assert server.post("/v1/completions", **body | {"max_tokens": 4})["choices"]
    finally:
        end(running if second is None else [*running, second.head_node])


@pytest.mark.slow
def test_a_cluster_without_room_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NODES_TIMEOUT_S", "2")
    with pytest.raises(StartupError, match=r"Ray has no room for 4 ranks after 2 s.*2 machines"):
        LLM(MODEL, tensor_parallel_size=4, distributed_executor_backend="ray")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"distributed_executor_backend=ray: .*quire\[ray\]"):
        LLM(MODEL, max_model_len=256, tensor_parallel_size=2, distributed_executor_backend="ray")
