"""What an engine on several machines needs, and what torchrun must have started: checked before anything is loaded.

Knows the configuration and torchrun's environment. Does not know connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire import env
from quire.config.cluster_key import cluster_key
from quire.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from quire.config.engine import Resolved


def check_nodes(resolved: Resolved) -> None:
    """Raises ConfigError, Unsupported: the number of machines, this one's number or the way to start ranks does not fit."""
    parallel, executor = resolved.config.parallel, resolved.executor
    nodes, ranks, engines = (
        parallel.nnodes,
        parallel.world_size,
        parallel.data_parallel_size,
    )
    if executor == "external_launcher":
        _check_launcher(ranks)
    if nodes == 1:
        if executor in ("ray", "external_launcher") and engines > 1:
            raise Unsupported(
                f"data_parallel_size={engines} with {executor}", "use mp, or one engine"
            )
        return
    if executor != "mp":
        raise ConfigError(
            f"nnodes={nodes} with distributed_executor_backend={executor}: use mp, or leave nnodes out"
        )
    if ranks % nodes:
        nearest = max(n for n in range(1, min(ranks, nodes) + 1) if ranks % n == 0)
        raise ConfigError(
            f"nnodes={nodes} does not divide the {ranks} ranks (the product of the parallel sizes); use {nearest}"
        )
    if parallel.node_rank >= nodes:
        raise ConfigError(
            f"node_rank={parallel.node_rank} with nnodes={nodes}: the machines have the numbers 0 to {nodes - 1}"
        )
    if engines > 1:
        raise Unsupported(
            f"nnodes={nodes} with data_parallel_size={engines}",
            "start one engine with several machines",
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
