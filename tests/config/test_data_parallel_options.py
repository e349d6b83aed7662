"""Options of data parallelism: which engines a command has, which combinations are refused, and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.data_parallel import check_data_parallel, check_device, num_http_processes
from quire.config.engine import EngineConfig
from quire.config.from_keywords import engine_config
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
        ({"size": 2, "backend": "ray"}, Unsupported, "use mp"),
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


def test_several_engines_need_a_device_each() -> None:
    check_device(config(size=2).parallel, "cpu")
    check_device(config(size=2, rank=1).parallel, "cuda")
    with pytest.raises(Unsupported, match="CUDA_VISIBLE_DEVICES=N"):
        check_device(config(size=2).parallel, "cuda")
