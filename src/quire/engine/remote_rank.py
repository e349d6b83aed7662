"""A node: `quire serve --nnodes 2 --node-rank 1 --headless` on a machine without the head runs ranks of the head's engine.

Knows the configuration, and which signals end the node. Does not know connections (`executor/node_supervisor.py`). No torch here.
"""

from __future__ import annotations

import signal
from types import FrameType

from quire import env
from quire.config.engine import EngineConfig
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
    key = cluster_key(parallel.master_addr)
    resolved = resolve_config(config)
    layout = RankLayout.of(parallel)
    return NodeSupervisor(
        (parallel.master_addr, parallel.port_of_engine),
        key,
        parallel.node_rank,
        layout.size // len(parallel.nodes_of_engine),
        memory_bytes(layout),
        node_fingerprint(resolved),
        local_paths(resolved),
        host=env.get("HOST_IP"),
        seconds=env.get("NODES_TIMEOUT_S"),
    )


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopNode
