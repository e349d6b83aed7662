"""torchrun starts the ranks: each is an engine of its own, with the worker in its process, and makes the same calls.

Knows torchrun's environment. Does not know what the engines must do alike (docs/machines.md). No torch here.
"""

from __future__ import annotations

import socket

from quire import env
from quire.config.engine import Resolved
from quire.parallel.address import RankAddress
from quire.parallel.layout import RankLayout
from quire.parallel.machines import EXCHANGE_S, Machines


def external_address(resolved: Resolved) -> RankAddress:
    """This process's rank. `config/nodes.py` has checked the variables."""
    parallel = resolved.config.parallel
    layout, rank = RankLayout.of(parallel), int(env.outer("RANK") or 0)
    local = int(env.outer("LOCAL_WORLD_SIZE") or layout.size)
    host = env.get("HOST_IP") or _route_to(env.outer("MASTER_ADDR") or "127.0.0.1")
    wait_s = parallel.cpu_distributed_timeout_seconds or EXCHANGE_S
    machines = Machines([each // local for each in range(layout.size)], host, exchange_s=wait_s)
    return RankAddress(rank, layout, machines=machines)


def _route_to(host: str) -> str:
    """The address from which this machine reaches `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
