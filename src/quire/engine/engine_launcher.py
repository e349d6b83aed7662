"""Starts the processes of the engines that share the requests of one server or program, and connects to them.

Knows how many engines a configuration has here, and their number and share of the machine. Does not know requests, or how
an engine is built. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire import env
from quire.config.engine import Resolved
from quire.config.engine_experts import engines_share_experts
from quire.config.serialize import resolved_to_bytes
from quire.engine.client import EngineClient
from quire.engine.data_parallel import DataParallelClient
from quire.engine.engine_state import StateBoard
from quire.engine.poison_requests import Suspects
from quire.engine.process_client import ProcessClient
from quire.engine.supervisor import EngineSupervisor
from quire.processes.restart_policy import RestartPolicy
from quire.processes.run_folder import shared_folder

if TYPE_CHECKING:
    from quire.engine.remote_engines import RemoteEngine


class EnginePlace(NamedTuple):
    """Where a frontend finds an engine."""

    folder: Path
    board: StateBoard
    supervisor: EngineSupervisor | RemoteEngine | None = None
    """In the process that supervises the engine."""


def close_all(places: Sequence[EnginePlace]) -> None:
    """End the engines. All are stopped first: engines on other machines end together."""
    supervisors = [place.supervisor for place in places if place.supervisor is not None]
    for one in supervisors:
        one.stop()
    for one in supervisors:
        one.close()


def restart_policy() -> RestartPolicy:
    return RestartPolicy(
        heartbeat=float(env.get("HEARTBEAT_TIMEOUT_S")),
        start=float(env.get("ENGINE_READY_TIMEOUT_S")),
        restarts=int(env.get("MAX_ENGINE_RESTARTS")),
    )


def payloads(resolved: Resolved, owner: object) -> list[bytes]:
    """What the process of each engine is built from. What the engines share is there as long as `owner`."""
    config, parallel = resolved.config, resolved.config.parallel
    ranks = parallel.local_ranks
    if len(parallel.ranks) == len(ranks) == 1:
        return [resolved_to_bytes(resolved)]
    if engines_share_experts(parallel):
        resolved = replace(resolved, experts_folder=str(shared_folder(owner)))
    return [
        resolved_to_bytes(replace(resolved, config=replace(config, parallel=replace(
            parallel, data_parallel_rank=rank, data_parallel_start_rank=ranks.start,
            data_parallel_size_local=parallel.share[1],
        ))))
        for rank in ranks
    ]  # fmt: skip


def supervise(resolved: Resolved, frontends: int = 1) -> list[EnginePlace]:
    """Start the processes of the engines of this machine, and listen for the nodes of the others.

    Raises:
        StartupError: no directory for the sockets.
        ConfigError: the address for nodes cannot be used.
    """
    parallel = resolved.config.parallel
    rest = range(len(parallel.local_ranks), len(parallel.ranks))
    if not rest:
        return supervise_local(resolved, frontends)
    from quire.engine.remote_engines import RemoteEngines

    remote = RemoteEngines(resolved, rest, frontends)
    others = [EnginePlace(one.folder, one.board, one) for one in remote.engines.values()]
    try:
        return [*supervise_local(resolved, frontends), *others]
    except BaseException:
        close_all(others)
        raise


def supervise_local(resolved: Resolved, frontends: int = 1) -> list[EnginePlace]:
    """Start the processes of the engines of this machine. Raises StartupError: no directory for the sockets."""
    found: list[EnginePlace] = []
    suspects, policy, parallel = Suspects(), restart_policy(), resolved.config.parallel
    try:
        for rank, payload in zip(parallel.local_ranks, payloads(resolved, suspects), strict=True):
            name = f"engine {rank}" if len(parallel.ranks) > 1 else "the engine"
            one = EngineSupervisor(payload, frontends, policy, suspects, name)
            found.append(EnginePlace(one.folder, one.board, one))
    except BaseException:
        close_all(found)
        raise
    return found


def connect(
    resolved: Resolved, places: Sequence[EnginePlace], number: int = 0, frontends: int = 1
) -> EngineClient:
    """The client of frontend `number` of `frontends` that send requests."""
    suspects = Suspects()
    clients = [
        ProcessClient(resolved, place.folder, place.board, place.supervisor, number, suspects)
        for place in places
    ]
    return clients[0] if len(clients) == 1 else DataParallelClient(clients, frontends)


def start_engines(resolved: Resolved) -> EngineClient:
    """Start the engines for one frontend in this process; they may still be loading."""
    return connect(resolved, supervise(resolved))
