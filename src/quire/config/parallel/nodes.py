"""Which machine has which engines and ranks (--nnodes), and what torchrun must have started: checked before anything is loaded.

Knows the configuration and torchrun's environment. Does not know connections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire import env
from quire.config.parallel.cluster_key import cluster_key
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig, Resolved


def with_engines_by_node(config: EngineConfig) -> EngineConfig:
    """With `nnodes` machines for several engines: which of the engines this machine has.

    If each machine has whole engines, the options of data parallelism say it, and nnodes becomes 1. If each engine has several
    machines, the processes of all engines are on machine 0, and the other machines have ranks only.

    Raises:
        ConfigError: an option contradicts these numbers.
    """
    parallel, headless = config.parallel, config.server.headless
    nodes, node, engines = parallel.nnodes, parallel.node_rank, parallel.data_parallel_size
    if parallel.distributed_executor_backend == "external_launcher" and engines > 1 and nodes == 1:
        return _with_launched_engine(config)
    if nodes == 1:
        return config
    if node >= nodes:
        raise ConfigError(
            f"node_rank={node} with nnodes={nodes}: the machines have the numbers 0 to {nodes - 1}"
        )
    for name in ("distributed_executor_backend", "data_parallel_backend"):
        if (backend := getattr(parallel, name)) in ("ray", "external_launcher"):
            raise ConfigError(f"nnodes={nodes} with {name}={backend}: use mp, or leave nnodes out")
    if engines == 1:
        return config
    about, local = f"nnodes={nodes} and data_parallel_size={engines}", max(1, engines // nodes)
    are_whole = engines % nodes == 0
    is_external = parallel.data_parallel_external_lb or parallel.is_external
    has_server = is_external or parallel.data_parallel_multi_port_external_lb or (parallel.is_hybrid and not headless)  # fmt: skip
    if has_server and not are_whole:
        raise ConfigError(
            f"{about} with a load balancer: each engine has several machines; start each engine by itself, with --nnodes and"
            " --master-addr of its own, and without data_parallel_size"
        )
    if is_external and local > 1:
        raise ConfigError(
            f"{about} with data_parallel_external_lb: each machine has {local} engines; use data_parallel_hybrid_lb or"
            " data_parallel_multi_port_external_lb"
        )
    if node and not (headless or has_server):
        raise ConfigError(f"node_rank={node}: machine 0 has the server; run quire serve with --headless on this one")  # fmt: skip
    own: dict[str, Any] = {"data_parallel_rank": node} if is_external else {"data_parallel_size_local": local}  # fmt: skip
    if are_whole and not is_external and (node or has_server):
        own["data_parallel_start_rank"] = node * local
    for name, value in own.items():
        if (given := getattr(parallel, name)) not in (None, value):
            raise ConfigError(f"{name}={given} with {about}: machine {node} has {value}; leave it out")  # fmt: skip
    if are_whole:
        address = parallel.data_parallel_address or parallel.master_addr
        own |= {"nnodes": 1, "node_rank": 0, "data_parallel_address": address}
    return replace(config, parallel=replace(parallel, **own))


def _with_launched_engine(config: EngineConfig) -> EngineConfig:
    """With torchrun: which of the engines this process belongs to. Neighbouring ranks have the same engine.

    Raises:
        ConfigError: torchrun has not started as many processes as the engines have ranks.
    """
    parallel = config.parallel
    size = parallel.world_size
    _check_launcher(size * parallel.data_parallel_size)
    rank, local_rank = int(env.outer("RANK") or 0), int(env.outer("LOCAL_RANK") or 0)
    local = int(env.outer("LOCAL_WORLD_SIZE") or size * parallel.data_parallel_size)
    own: dict[str, Any] = {
        "data_parallel_rank": rank // size,
        "data_parallel_start_rank": max(0, rank - local_rank) // size,
        "data_parallel_size_local": max(1, local // size),
    }
    return replace(config, parallel=replace(parallel, **own))


def check_nodes(resolved: Resolved) -> None:
    """Raises ConfigError: the number of machines or the way to start ranks does not fit."""
    parallel, executor = resolved.config.parallel, resolved.executor
    nodes, ranks, engines = parallel.nnodes, parallel.world_size, parallel.data_parallel_size
    if executor == "external_launcher":
        _check_launcher(ranks * engines)
    if nodes == 1:
        return

    def fits(number: int) -> bool:
        return engines % number == 0 or (number % engines == 0 and ranks % (number // engines) == 0)

    if not fits(nodes):
        nearest = max(filter(fits, range(1, nodes)))
        raise ConfigError(
            f"nnodes={nodes} with data_parallel_size={engines} and {ranks} ranks in each engine (the product of the other parallel"
            f" sizes): each machine has the same number of ranks, or of whole engines; use {nearest}"
        )
    cluster_key(parallel.master_addr)


def check_head(resolved: Resolved, process: bool) -> None:
    """Raises ConfigError: this machine has no engine, only ranks of the head's; or torchrun's engine would get a process."""
    if process and resolved.executor == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend=external_launcher is for programs with LLM(...), which torchrun starts; use mp"
        )
    if (rank := resolved.config.parallel.node_rank) > 0:
        raise ConfigError(f"node_rank={rank} has no engine: run quire serve with --headless there")


def _check_launcher(ranks: int) -> None:
    """torchrun has started as many processes as there are ranks."""
    start = f"start the program with torchrun --nproc-per-node {ranks}"
    for name in ("RANK", "WORLD_SIZE"):
        if not (env.outer(name) or "").isdigit():
            raise ConfigError(
                f"distributed_executor_backend=external_launcher: {name} is not set: {start}"
            )
    if int(world := env.outer("WORLD_SIZE") or "") != ranks:
        raise ConfigError(
            f"WORLD_SIZE={world}: the parallel sizes make {ranks} ranks, one for each process; {start}"
        )
