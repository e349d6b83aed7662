"""Ray starts the ranks: an actor on each machine of a placement group, which joins the engine's head as a node does.

Knows Ray's placement groups and actors. Does not know how ranks connect (`executor/node_supervisor.py`). Ray itself pickles what it
sends, and runs it: its ports belong into a closed network. No torch here.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from quire import env
from quire.config.engine import Resolved
from quire.config.parallel.parallel_config import ParallelConfig
from quire.config.serialize import resolved_from_bytes, resolved_to_bytes
from quire.engine.node_launcher import NodeLauncher
from quire.engine.remote_rank import node_of
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, StartupError
from quire.logging import configure
from quire.parallel.layout import RankLayout

INSTALL = "install Ray on all machines: pip install quire[ray]"
NODE_LABEL = "ray.io/node-id"
"""Ray gives each machine this label."""
CLOSE_S = 5.0
"""How long Ray may take to end the actors; its end of their processes ends them too."""
NOT_COPIED = ("HOST_IP", "LOCAL_RANK", "VISIBLE_DEVICES")
"""Ends of the names of variables that each machine sets for itself."""


class RayNode:
    """The actor: the ranks of one machine."""

    def run(
        self,
        resolved: bytes,
        environment: dict[str, str],
        head: tuple[str, int],
        key: bytes,
        number: int,
        num_ranks: int,
    ) -> None:
        """Serve until the head is stopped or gone. Raises QuireError: the checkpoint is not here; as `NodeSupervisor.run`."""
        env.adopt(environment, NOT_COPIED)
        configure("node")
        found = resolve_config(resolved_from_bytes(resolved).config)
        node_of(found, head, key, number, num_ranks, follows=False).run()


class RayLauncher(NodeLauncher):
    """The placement group and the actors of one engine process.

    Raises:
        ConfigError: Ray is not installed, or does not run.
        StartupError: the cluster has no room for the ranks.
    """

    port = first_rank = 0

    def __init__(self, resolved: Resolved):
        parallel, seconds = resolved.config.parallel, env.get("NODES_TIMEOUT_S")
        count, machine = RankLayout.of(parallel).size, machine_of(parallel)
        try:
            import ray
            from ray import util
        except ImportError:
            raise ConfigError(f"distributed_executor_backend=ray: {INSTALL}") from None
        self._ray, self._util = ray, util
        if not ray.is_initialized():
            try:
                # other engines use the same cluster, so this one does not start it
                ray.init(address="auto" if parallel.data_parallel_size > 1 else None)
            except ConnectionError:
                raise ConfigError("Ray does not run, and several engines need one cluster: run `ray start --head` before") from None  # fmt: skip
        self.key = secrets.token_bytes(32)
        self._actors: list[Any] = []
        self._running: list[Any] = []
        self._own = (group := util.get_current_placement_group()) is None
        self._group = group or util.placement_group(
            [{"CPU": 1}] * count,
            strategy="PACK",
            bundle_label_selector=self._labels(count, machine),
        )
        if not ray.wait([self._group.ready()], timeout=seconds)[0]:
            has = ray.available_resources().get("CPU", 0)
            self.close()
            where = "" if machine is None else f" on machine {machine}"
            raise StartupError(
                f"Ray has no room for {count} ranks{where} after {seconds:.0f} s: each needs a CPU, and {has:g} are free on"
                f" {len(self._nodes())} machines of the cluster at {ray.get_runtime_context().gcs_address}; start `ray start"
                " --address=...` on more machines, or use fewer ranks"
            )
        places = util.placement_group_table(self._group)["bundles_to_node_id"]
        own = ray.get_runtime_context().get_node_id()
        self.bundles: dict[str, list[int]] = {}
        for bundle, node in sorted(
            places.items(), key=lambda where: (where[1] != own, where[1], where[0])
        ):
            if sum(map(len, self.bundles.values())) < count:
                self.bundles.setdefault(node, []).append(bundle)
        self.counts = {number: len(each) for number, each in enumerate(self.bundles.values())}
        self.host = str(env.get("HOST_IP") or util.get_node_ip_address())

    def _nodes(self) -> list[str]:
        """The machines of the cluster, the driver's first."""
        own = self._ray.get_runtime_context().get_node_id()
        alive = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        return sorted(alive, key=lambda node: (node != own, node))

    def _labels(self, count: int, machine: int | None) -> list[dict[str, str]] | None:
        """Labels that pin each bundle to a machine. Raises StartupError: the cluster has too few machines."""
        if machine is None:
            return None
        if machine >= len(nodes := self._nodes()):
            raise StartupError(
                f"data_parallel_size and data_parallel_size_local need {machine + 1} machines or more, and the Ray cluster has"
                f" {len(nodes)}: start `ray start --address=...` on more, or raise data_parallel_size_local"
            )
        return [{NODE_LABEL: nodes[machine]}] * count

    def start(self, resolved: Resolved, head: tuple[str, int]) -> None:
        """An actor on each machine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        payload = resolved_to_bytes(resolved)
        for number, bundles in enumerate(self.bundles.values()):
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundles[0]
            )
            actor = self._ray.remote(RayNode).options(num_cpus=1, scheduling_strategy=place)
            self._actors.append(actor.remote())
            self._running.append(self._actors[-1].run.remote(
                payload, env.for_a_child(), head, self.key, number, len(bundles)
            ))  # fmt: skip

    def check(self) -> None:
        """Raises StartupError: a machine has failed."""
        done, _ = self._ray.wait(self._running, num_returns=len(self._running), timeout=0)
        for one in done:
            try:
                self._ray.get(one)
            except Exception as why:
                number = self._running.index(one)
                raise StartupError(f"node {number} of Ray failed: {why}") from None

    def close(self) -> None:
        """End the actors, and give the CPUs back. May be called twice. Ray's head may be gone, for which Ray would wait a minute."""
        closing = threading.Thread(target=self._close, name="ray-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _close(self) -> None:
        if not self._ray.is_initialized():
            return  # the program has left the cluster, and with it its actors have ended
        actors, own, self._actors, self._own = self._actors, self._own, [], False
        for actor in actors:
            self._ray.kill(actor)
        if own:
            self._util.remove_placement_group(self._group)


def machine_of(parallel: ParallelConfig) -> int | None:
    """The number of the machine for all ranks of this engine, this one first; None: Ray chooses."""
    engines = parallel.data_parallel_size_local
    if parallel.data_parallel_backend != "ray" or not engines:
        return None
    return (
        (parallel.data_parallel_rank or 0) - (parallel.data_parallel_start_rank or 0)
    ) // engines
