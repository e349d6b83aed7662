"""Data parallelism: which combinations of its options are refused, and how many HTTP processes serve several engines.

Knows numbers of engines, and what distributes the requests: this server among all engines (internal), or among its
machine's engines while a load balancer distributes among machines (hybrid); or a load balancer among all (external, multi-port).
"""

from __future__ import annotations

from quire import env
from quire.config.parallel.parallel_config import LOOPBACK, ParallelConfig
from quire.config.server import ServerConfig
from quire.errors import ConfigError, Unsupported


def check_data_parallel(parallel: ParallelConfig, server: ServerConfig) -> None:
    """Raises ConfigError: two options contradict each other."""
    size, local, rank = (
        parallel.data_parallel_size,
        parallel.data_parallel_size_local,
        parallel.data_parallel_rank,
    )
    first = parallel.data_parallel_start_rank
    of = f"data_parallel_size={size}"
    refused = {
        f"data_parallel_size_local={local} is more than {of}: set --data-parallel-size to the engines of all machines": local is not None and local > size,
        f"data_parallel_rank={rank}: with {of} the ranks are 0 to {size - 1}": rank is not None and rank >= size,
        f"data_parallel_start_rank={first} and data_parallel_size_local={local} are engines up to {(first or 0) + (local or 1) - 1}, but with {of} the last is {size - 1}": first is not None and first + (local or 1) > size,
        "data_parallel_hybrid_lb and data_parallel_external_lb name two balancers: leave one out": parallel.is_hybrid and parallel.data_parallel_external_lb,
        "data_parallel_start_rank and data_parallel_hybrid_lb need data_parallel_size_local: the number of engines on this machine": parallel.is_hybrid and rank is None and local is None,
        "data_parallel_external_lb needs data_parallel_rank: which of the engines this server has": parallel.data_parallel_external_lb and rank is None,
        f"data_parallel_multi_port_external_lb needs at least 2 engines on this machine, and data_parallel_size_local is {local}": parallel.data_parallel_multi_port_external_lb and (local or 0) < 2,
        f"data_parallel_multi_port_external_lb: {of} is not a multiple of data_parallel_size_local={local}": parallel.data_parallel_multi_port_external_lb and bool(local) and size % (local or 1) != 0,
        f"disable_frontend_multiprocessing with {of}: several engines need processes of their own; leave it out": server.disable_frontend_multiprocessing and len(parallel.ranks) > 1,
        "headless with data_parallel_backend=ray: Ray starts the ranks on all machines; run only the server, without --headless": parallel.data_parallel_backend == "ray" and server.headless,
        "headless needs data_parallel_start_rank: which of the engines this machine has": server.headless and first is None and parallel.nnodes == 1,
        f"headless runs no HTTP processes, and api_server_count is {server.api_server_count}: leave one out": server.headless and bool(server.api_server_count),
        f"data_parallel_backend=ray with distributed_executor_backend={parallel.distributed_executor_backend}: Ray starts the ranks; leave one out": parallel.data_parallel_backend == "ray" and parallel.distributed_executor_backend not in (None, "ray"),
        "api_server_count=0 starts no HTTP process: use at least 1, or --headless for the engines of another server": server.api_server_count == 0 and not server.headless,
        "headless runs engines for another server, which balances: leave data_parallel_rank and the _lb options out": server.headless and (rank is not None or parallel.data_parallel_hybrid_lb or parallel.data_parallel_external_lb or parallel.data_parallel_multi_port_external_lb),
    }  # fmt: skip
    for why, is_given in refused.items():
        if is_given:
            raise ConfigError(why)


def check_device(parallel: ParallelConfig, device: str) -> None:
    """Raises Unsupported: several engines of one server would use the same accelerator."""
    if len(parallel.ranks) > 1 and device != "cpu":
        raise Unsupported(
            f"data_parallel_size={parallel.data_parallel_size} behind one server on {device}",
            "start a server for each device: CUDA_VISIBLE_DEVICES=N quire serve MODEL --data-parallel-rank N",
        )


def from_environment() -> dict[str, int]:
    """The options of one of several programs that were started with VLLM_DP_RANK: each has one engine.

    They divide this machine's cores if VLLM_DP_MASTER_IP is this machine, or unset.
    """
    if env.get("DP_RANK") is None:
        return {}
    size, rank = int(env.get("DP_SIZE") or 1), int(env.get("DP_RANK"))
    found = {"data_parallel_size": size, "data_parallel_rank": rank}
    if env.get("DP_MASTER_IP") in LOOPBACK:
        found |= {"data_parallel_size_local": size, "data_parallel_start_rank": 0}
    return found


def num_http_processes(parallel: ParallelConfig, server: ServerConfig, cores: int) -> int:
    """One for each engine, but none that would take a core from an engine; or as configured."""
    if server.api_server_count is not None:
        return server.api_server_count
    engines = len(parallel.ranks)
    return max(1, min(engines, cores - engines)) if engines > 1 else 1
