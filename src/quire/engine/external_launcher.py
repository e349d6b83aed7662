"""torchrun starts the ranks: each is an engine of its own, with the worker in its process, and makes the same calls.

Knows torchrun's environment. Does not know what the engines must do alike (docs/machines.md). No torch here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire import env
from quire.config.engine import Resolved
from quire.errors import StepFailed
from quire.executor.base import FailedStep, StepFuture
from quire.executor.inline import InlineExecutor
from quire.parallel.layout import RankLayout
from quire.parallel.multi_node import EXCHANGE_S
from quire.parallel.rank_address import RankAddress
from quire.parallel.torchrun import RankWatch, TorchrunMachines
from quire.protocol.plan import StepPlan

if TYPE_CHECKING:
    from quire.worker.worker import Worker


class RankExecutor(InlineExecutor):
    """Runs the worker of one rank. A step that not all ranks fail ends the engines of all, as it ends a group of processes."""

    def __init__(self, worker: Worker, watch: RankWatch):
        super().__init__(worker)
        self.watch = watch

    def launch(self, plan: StepPlan) -> StepFuture:
        try:
            try:
                return self.worker.run(plan)
            except StepFailed as error:
                self.watch.failed(error)
                return FailedStep(error)
        except BaseException as error:
            self.watch.leave(str(error))
            raise

    def close(self) -> None:
        self.watch.leave("it was stopped")


def external_executor(resolved: Resolved, make: Callable[[RankAddress], Worker]) -> RankExecutor:
    """The executor of this process' rank, with the worker that `make` makes."""
    machines = torchrun_machines(resolved)
    address = RankAddress(machines.rank, RankLayout.of(resolved.config.parallel), machines=machines)
    return RankExecutor(make(address), machines.watch)


def torchrun_machines(resolved: Resolved) -> TorchrunMachines:
    """Of this process' rank. `config/parallel/nodes.py` has checked the variables."""
    parallel = resolved.config.parallel
    size, rank = RankLayout.of(parallel).size, int(env.outer("RANK") or 0)
    local = int(env.outer("LOCAL_WORLD_SIZE") or size)
    first = rank - rank % size  # of this engine, among the ranks of all engines
    host = env.get("HOST_IP") or _route_to(env.outer("MASTER_ADDR") or "127.0.0.1")
    wait_s = parallel.cpu_distributed_timeout_seconds or EXCHANGE_S
    nodes = [(first + each) // local - first // local for each in range(size)]
    return TorchrunMachines(nodes, host, exchange_s=wait_s, rank=rank - first, engine=first // size)


def _route_to(host: str) -> str:
    """The address from which this machine reaches `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
