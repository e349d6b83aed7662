"""Starts the processes of an engine's ranks: on this machine, or on several, where nodes connect or Ray starts them.

Knows the configuration and the ranks' addresses. Does not know what a rank computes. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import msgspec

from quire import env
from quire.config.engine import Resolved
from quire.config.model_sizes import model_size
from quire.config.serialize import resolved_to_bytes
from quire.config.server import ServerConfig
from quire.engine.node_fingerprint import node_fingerprint
from quire.engine.node_launcher import NodeLauncher
from quire.executor.base import Executor
from quire.executor.control_port import ControlPort
from quire.executor.multiproc_executor import MultiprocExecutor
from quire.executor.rank_process import Start, spawn
from quire.parallel.layout import RankLayout
from quire.parallel.multi_node import EXCHANGE_S, Machines
from quire.parallel.rank_address import RankAddress, addresses
from quire.startup_timer import Report


def start_ranks(target: str, resolved: Resolved, report: Report) -> Executor:
    """A process for each rank.

    Args:
        target: "module:function", which creates a worker from a payload of `payload_of`.
        report: receives the progress of the first rank.

    Raises:
        ConfigError: the control port's address or key is wrong, or there are more stages than layers.
        StartupError: a rank, or a machine, did not start.
    """
    layout = RankLayout.of(resolved.config.parallel)
    # refuses more stages than layers before anything starts
    layout.layers(0, model_size(resolved.hf_config, "num_hidden_layers", layout.pipeline))
    make = partial(MultiprocExecutor, target, report=report, answering=layout.answering)
    if resolved.executor == "ray":
        from quire.engine.ray_nodes import RayLauncher

        return _over_nodes(RayLauncher(resolved), resolved, make)
    if resolved.config.parallel.nnodes > 1:
        return _over_nodes(NodeLauncher(resolved), resolved, make)
    with addresses(layout) as ranks:
        payloads = [payload_of(resolved, own) for own in ranks]
        return make(payloads, [partial(spawn, own.fds) for own in ranks])


def _over_nodes(
    launcher: NodeLauncher, resolved: Resolved, make: Callable[..., MultiprocExecutor]
) -> Executor:
    """Wait until the launcher's ranks are connected. `make`: the executor, from payloads and starts of all ranks."""
    with ExitStack() as on_failure:
        on_failure.callback(launcher.close)
        facts, address = node_fingerprint(resolved), (launcher.host, launcher.port)
        port = ControlPort(*address, launcher.key, facts, launcher.counts, launcher.first_rank)
        on_failure.callback(port.close, False)
        launcher.start(resolved, (port.host, port.port))
        port.wait(env.get("NODES_TIMEOUT_S"), launcher.check)

        def end(stopped: bool) -> None:
            port.close(stopped)
            launcher.close()

        with ranks_on_nodes(port, resolved) as (payloads, starts):
            executor = make(payloads, starts, on_end=end)
        on_failure.pop_all()
        return executor


@contextmanager
def ranks_on_nodes(
    port: ControlPort, resolved: Resolved
) -> Iterator[tuple[list[bytes], list[Start]]]:
    """Payloads and starts of all ranks: of those that are here, up to the first rank of the other nodes, and of those there."""
    parallel = resolved.config.parallel
    layout, here = RankLayout.of(parallel), min(port.first_ranks.values())
    nodes = [0] * here + [node for node, count in sorted(port.expected.items()) for _ in range(count)]  # fmt: skip
    # A rank gets its part of the memory of a machine with the most ranks.
    most = max(here, *port.expected.values())
    parallel = replace(parallel, nnodes=layout.size // most)
    resolved = replace(resolved, config=replace(resolved.config, parallel=parallel))
    wait_s = parallel.cpu_distributed_timeout_seconds or EXCHANGE_S
    meeting = port.host, port.port
    own = Machines(nodes, env.get("HOST_IP") or port.host, meeting, port.rendezvous_key, wait_s)
    payloads: list[bytes] = []
    starts: list[Start] = []
    with addresses(layout) as ranks:
        for rank, address in enumerate(ranks):
            if rank < here:
                address = RankAddress(rank, layout, address.fd, machines=own)
                payloads.append(payload_of(resolved, address))
                starts.append(partial(spawn, address.fds))
                continue
            node = port.nodes[nodes[rank]]
            machines = msgspec.structs.replace(own, host=node.host, meeting=node.head)
            fd = node.fd if address.fd >= 0 else -1
            address = RankAddress(rank, layout, fd, machines=machines)
            payloads.append(payload_of(on_node(resolved, node.paths), address))
            starts.append(partial(port.take, rank))
        yield payloads, starts


def on_node(resolved: Resolved, paths: dict[str, str]) -> Resolved:
    """As another machine needs it: its own directories, no secrets."""
    model, draft = replace(resolved.config.model, hf_token=None), resolved.draft
    config = replace(resolved.config, server=ServerConfig(), model=model)
    if draft is not None:
        draft = msgspec.structs.replace(draft, path=paths["draft"])
    path, tokenizer = paths["path"], paths["tokenizer_path"]
    return replace(resolved, config=config, path=path, tokenizer_path=tokenizer, draft=draft)


def payload_of(resolved: Resolved, address: RankAddress) -> bytes:
    """What the worker of a rank is built from in its process."""
    return msgspec.msgpack.encode((resolved_to_bytes(resolved), address))
