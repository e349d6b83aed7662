"""A node: `quire serve --nnodes 2 --node-rank 1 --headless` on a machine without the head runs ranks of the head's engine.

Knows the configuration, and which signals end the node. Does not know connections (`executor/node_supervisor.py`). No torch here.
"""

from __future__ import annotations

import signal
from types import FrameType

from quire import env
from quire.config.engine import EngineConfig, Resolved
from quire.config.parallel.cluster_key import cluster_key
from quire.engine.node_fingerprint import local_paths, node_fingerprint
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.executor.node_supervisor import NodeSupervisor
from quire.logging import get_logger
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import memory_bytes

log = get_logger(__name__)


class StopNode(BaseException):
    """A signal ends this node."""


def run_node(config: EngineConfig) -> int:
    """Run this machine's ranks until the head was stopped, or a signal comes. Returns the exit status.

    Raises:
        QuireError: the configuration is wrong, the head does not answer, or it refuses this node.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        make_node(config).run()
    except StopNode:
        log.info("this node was stopped")
    return 0


def make_node(config: EngineConfig) -> NodeSupervisor:
    """Raises QuireError: the configuration is wrong, or its checkpoint is not here."""
    parallel = config.parallel
    if not parallel.node_rank:
        raise ConfigError(
            f"headless with nnodes={parallel.nnodes} and node_rank=0: machine 0 has the HTTP server; leave --headless out, or"
            " set both numbers"
        )
    head, key = (parallel.master_addr, parallel.port_of_engine), cluster_key(parallel.master_addr)
    num_ranks = RankLayout.of(parallel).size // len(parallel.nodes_of_engine)
    return node_of(resolve_config(config), head, key, parallel.node_rank, num_ranks)


def node_of(
    resolved: Resolved,
    head: tuple[str, int],
    key: bytes,
    number: int,
    num_ranks: int,
    follows: bool = True,
) -> NodeSupervisor:
    """The ranks of this machine; see `NodeSupervisor`. Raises QuireError: the checkpoint is not here."""
    shared = memory_bytes(RankLayout.of(resolved.config.parallel))
    facts, paths = node_fingerprint(resolved), local_paths(resolved)
    return NodeSupervisor(
        head, key, number, num_ranks, shared, facts, paths,
        host=env.get("HOST_IP"), seconds=env.get("NODES_TIMEOUT_S"), follows=follows,
    )  # fmt: skip


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopNode
