"""NodeLauncher: where the ranks of an engine's other machines come from, which connect to the control port of the head.

This one is for `--nnodes`: a user starts a node on each machine (`remote_rank.py`). `ray_nodes.py` starts them itself. Knows the
configuration. Does not know connections. No torch here.
"""

from __future__ import annotations

from quire.config.engine import Resolved
from quire.config.parallel.cluster_key import cluster_key
from quire.parallel.layout import RankLayout


class NodeLauncher:
    """The nodes come by themselves, and end when the head does.

    Attributes:
        host, port: where the head listens; port 0: any free one.
        key: which the nodes have.
        counts: how many ranks each node has: node -> number.
        first_rank: the first of them. Those before it are children of the head.

    Raises:
        ConfigError: there is no key for the head's address.
    """

    host: str
    port: int
    key: bytes
    counts: dict[int, int]
    first_rank: int

    def __init__(self, resolved: Resolved):
        parallel = resolved.config.parallel
        machines = parallel.nodes_of_engine
        count = RankLayout.of(parallel).size // len(machines)
        self.host, self.port = parallel.master_addr, parallel.port_of_engine
        self.key = cluster_key(self.host)
        self.counts = {node: count for node in machines if node}
        # the head is on the first engine's first machine
        self.first_rank = 0 if machines.start else count

    def start(self, resolved: Resolved, head: tuple[str, int]) -> None:
        """Start the nodes: the head listens there."""

    def check(self) -> None:
        """Called now and then while the head waits for the nodes. Raises StartupError: one of them has failed."""

    def close(self) -> None:
        """The ranks have ended. May be called twice."""
