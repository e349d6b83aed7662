"""Options of data parallelism: which engines a command has, which combinations are refused, and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.from_keywords import engine_config
from quire.config.parallel.data_parallel import (
    check_data_parallel,
    check_device,
    num_http_processes,
)
from quire.config.parallel.nodes import with_engines_by_node
from quire.errors import ConfigError, Unsupported


def config(**given: Any) -> EngineConfig:
    names = {name: f"data_parallel_{name}" for name in given if name not in ("api_server_count", "headless", "disable_frontend_multiprocessing")}  # fmt: skip
    return EngineConfig.from_keywords(
        **{names.get(key, key): value for key, value in given.items()}
    )


@pytest.mark.parametrize(
    ("given", "ranks", "share"),
    [
        ({}, [0], (0, 1)),
        ({"size": 2}, [0, 1], (0, 2)),
        ({"size": 4, "rank": 3}, [3], (0, 1)),
        ({"size": 4, "rank": 3, "external_lb": True}, [3], (0, 1)),
        ({"size": 4, "size_local": 2, "start_rank": 2}, [2, 3], (0, 2)),
        ({"size": 4, "size_local": 2, "hybrid_lb": True}, [0, 1], (0, 2)),
        ({"size": 4, "size_local": 2}, [0, 1, 2, 3], (0, 2)),
        ({"size": 4, "size_local": 0}, [0, 1, 2, 3], (0, 1)),
        (
            {"size": 4, "size_local": 2, "start_rank": 2, "headless": True, "api_server_count": 0},
            [2, 3],
            (0, 2),
        ),
        ({"size": 4, "size_local": 2, "start_rank": 2, "rank": 3}, [3], (1, 2)),  # of a process
    ],
)
def test_which_engines(given: dict[str, Any], ranks: list[int], share: tuple[int, int]) -> None:
    made = config(**given)
    check_data_parallel(made.parallel, made.server)
    assert list(made.parallel.ranks) == ranks
    assert made.parallel.share == share


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        ({"size": 2, "size_local": 3}, ConfigError, "data_parallel_size_local=3 is more than data_parallel_size=2"),
        ({"size": 2, "rank": 2}, ConfigError, "data_parallel_rank=2: with data_parallel_size=2 the ranks are 0 to 1"),
        ({"size": 4, "size_local": 2, "start_rank": 3}, ConfigError, "engines up to 4.*the last is 3"),
        ({"size": 2, "size_local": 1, "hybrid_lb": True, "external_lb": True}, ConfigError, "leave one out"),
        ({"size": 2, "hybrid_lb": True}, ConfigError, "hybrid_lb need data_parallel_size_local"),
        ({"size": 2, "external_lb": True}, ConfigError, "needs data_parallel_rank"),
        ({"size": 4, "size_local": 1, "multi_port_external_lb": True}, ConfigError, "at least 2 engines.* is 1"),
        ({"size": 5, "size_local": 2, "multi_port_external_lb": True}, ConfigError, "size=5 is not a multiple of .*local=2"),
        ({"size": 2, "disable_frontend_multiprocessing": True}, ConfigError, "need processes of their own"),
        ({"size": 2, "backend": "ray", "headless": True}, ConfigError, "Ray starts the ranks on all machines"),
        ({"size": 2, "headless": True}, ConfigError, "headless needs data_parallel_start_rank"),
        ({"size": 2, "start_rank": 1, "size_local": 1, "headless": True, "api_server_count": 2}, ConfigError, "no HTTP processes, and api_server_count is 2"),
        ({"size": 2, "start_rank": 1, "size_local": 1, "headless": True, "hybrid_lb": True}, ConfigError, "leave data_parallel_rank and"),
        ({"api_server_count": 0}, ConfigError, "api_server_count=0 starts no HTTP process"),
    ],
)  # fmt: skip
def test_refused(given: dict[str, Any], kind: type[Exception], why: str) -> None:
    made = config(**given)
    with pytest.raises(kind, match=why):
        check_data_parallel(made.parallel, made.server)


@pytest.mark.parametrize(
    ("given", "cores", "count"),
    [
        ({}, 16, 1),
        ({"size": 2}, 2, 1),
        ({"size": 2}, 3, 1),
        ({"size": 4}, 16, 4),
        ({"size": 4, "rank": 1}, 16, 1),
        ({"size": 2, "api_server_count": 3}, 1, 3),
    ],
)
def test_http_processes(given: dict[str, Any], cores: int, count: int) -> None:
    made = config(**given)
    assert num_http_processes(made.parallel, made.server, cores) == count


def test_programs_that_a_script_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's example of offline data parallelism: each program has one engine, and divides the cores with the others."""
    for name, value in {"DP_SIZE": "4", "DP_RANK": "2", "DP_RANK_LOCAL": "2", "DP_MASTER_IP": "127.0.0.1", "DP_MASTER_PORT": "13345"}.items():  # fmt: skip
        monkeypatch.setenv(f"VLLM_{name}", value)
    parallel = engine_config({}).parallel
    assert (list(parallel.ranks), parallel.share) == ([2], (2, 4))
    monkeypatch.setenv("VLLM_DP_MASTER_IP", "10.0.0.1")
    parallel = engine_config({}).parallel
    assert (list(parallel.ranks), parallel.share) == ([2], (0, 1))


MANY = {"data_parallel_size": 4, "nnodes": 2, "master_addr": "127.0.0.2"}
WIDE = {"data_parallel_size": 2, "tensor_parallel_size": 2, "nnodes": 4}


@pytest.mark.parametrize(
    ("given", "ranks", "here", "share"),
    [
        (MANY, [0, 1, 2, 3], [0, 1], (0, 2)),
        (MANY | {"node_rank": 1, "headless": True}, [2, 3], [2, 3], (0, 2)),
        (MANY | {"node_rank": 1, "data_parallel_hybrid_lb": True}, [2, 3], [2, 3], (0, 2)),
        (MANY | {"data_parallel_size": 2, "node_rank": 1, "data_parallel_external_lb": True}, [1], [1], (0, 1)),
        (MANY | {"node_rank": 1, "data_parallel_multi_port_external_lb": True}, [2, 3], [2, 3], (0, 2)),
        (WIDE, [0, 1], [0, 1], (0, 1)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_backend": "ray"}, [0, 1, 2, 3], [0, 1, 2, 3], (0, 2)),
    ],
)  # fmt: skip
def test_which_engines_a_machine_has(
    given: dict[str, Any], ranks: list[int], here: list[int], share: tuple[int, int]
) -> None:
    made = engine_config(given, "flag")
    check_data_parallel(made.parallel, made.server)
    assert (list(made.parallel.ranks), list(made.parallel.local_ranks)) == (ranks, here)
    assert made.parallel.share == share
    if "master_addr" in given:
        assert (made.parallel.nnodes, made.parallel.data_parallel_address) == (1, "127.0.0.2")
    assert with_engines_by_node(made) == made


@pytest.mark.parametrize(
    ("given", "nodes", "port"),
    [
        ({}, [0, 1], 29501),
        (
            {"data_parallel_rank": 1},
            [2, 3],
            29502,
        ),  # the process of the second engine, on machine 0
        ({"node_rank": 1}, [0, 1], 29501),
        ({"node_rank": 2}, [2, 3], 29502),
        ({"node_rank": 3}, [2, 3], 29502),
    ],
)
def test_which_machines_an_engine_has(given: dict[str, Any], nodes: list[int], port: int) -> None:
    made = EngineConfig.from_keywords(**WIDE, **given).parallel
    assert (list(made.nodes_of_engine), made.port_of_engine) == (nodes, port)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (MANY | {"node_rank": 2}, "node_rank=2 with nnodes=2"),
        (MANY | {"node_rank": 1}, "node_rank=1: machine 0 has the server; .* --headless"),
        (MANY | {"data_parallel_size_local": 1}, "size_local=1 with nnodes=2 and data_parallel_size=4: machine 0 has 2"),
        (MANY | {"data_parallel_start_rank": 1, "node_rank": 1, "headless": True}, "start_rank=1 with .*machine 1 has 2"),
        (MANY | {"data_parallel_backend": "ray"}, "nnodes=2 with data_parallel_backend=ray: use mp"),
        (MANY | {"data_parallel_external_lb": True}, "each machine has 2 engines; use data_parallel_hybrid_lb"),
        (WIDE | {"data_parallel_hybrid_lb": True}, "start each engine by itself"),
    ],
)  # fmt: skip
def test_refused_by_node(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine_config(given, "flag")


def test_several_engines_need_a_device_each() -> None:
    check_device(config(size=2).parallel, "cpu")
    check_device(config(size=2, rank=1).parallel, "cuda")
    with pytest.raises(Unsupported, match="CUDA_VISIBLE_DEVICES=N"):
        check_device(config(size=2).parallel, "cuda")
