"""Stages of a pipeline that are threads of one process, for tests: real sockets between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import RankAddress, addresses
from quire.parallel.ranks import RankGroups, split_among
from quire.parallel.regions import StageSocketFds
from quire.parallel.stage_sockets import StageSockets
from quire.parallel.stages import within_stage


def own_sockets(address: RankAddress) -> StageSocketFds:
    """Copies of its sockets, as an inherited address has."""
    fds = address.sockets
    previous, following = (os.dup(fd) if fd >= 0 else fd for fd in (fds.previous, fds.next))
    return StageSocketFds(previous, following, [os.dup(fd) for fd in fds.others])


def on_layout(layout: RankLayout, run: Callable[[RankGroups], Any]) -> list[Any]:
    """What each rank's call gives; all run at once, and models are constructed as their parts."""

    def one(address: RankAddress) -> Any:
        fd = os.dup(address.fd) if address.fd >= 0 else -1
        ranks = RankAddress(address.rank, layout, fd, own_sockets(address)).join()
        try:
            with split_among(ranks.tensor), within_stage(ranks.stage):
                return run(ranks)
        finally:
            if isinstance(ranks.stages, StageSockets):
                ranks.stages.close()

    with addresses(layout) as found, ThreadPoolExecutor(layout.size) as threads:
        futures = [threads.submit(copy_context().run, one, address) for address in found]
        return [future.result() for future in futures]
