"""The named functions of an engine: what `EngineClient.call` may ask for.

Knows the core and its executor. Every function takes and gives builtins, so that it crosses a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.engine.core import EngineCore
from quire.protocol.output import FinishReason
from quire.scheduler.fair_queue import FairQueue


def functions(core: EngineCore) -> dict[str, Callable[..., Any]]:
    """By name; features add theirs in `assemble.py`."""

    def reset_prefix_cache(running: bool = False) -> bool:
        """Forget cached prefixes; False if some were in use and stay. `running`: requests give theirs up, and are
        computed again."""
        if running:
            core.settle()
            core.scheduler.set_back_all()
        return core.scheduler.kv.reset()

    def stats() -> dict[str, Any]:
        """An EngineStats as builtins."""
        return dict(msgspec.structs.asdict(core.stats()))

    def collective_rpc(method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of every worker; one answer each."""
        return list(core.executor.call("collective_rpc", method, args, kwargs))

    def set_weights(weights: dict[str, float]) -> None:
        """How tenants share the engine from now on; nothing where they do not."""
        if isinstance(core.scheduler.waiting, FairQueue):
            core.scheduler.waiting.weights = weights

    def abort_client(number: int) -> int:
        """End every request of a front room that is gone; how many there were. Nobody is told."""
        scheduler = core.scheduler
        ids = [id for id, request in scheduler.requests.items() if request.client == number]
        for id in ids:
            scheduler.abort(id)
        return len(ids)

    def requests() -> list[str]:
        """Ids of all that wait or run."""
        return list(core.scheduler.requests)

    def end(ids: list[str]) -> None:
        """End these requests; each front room is told of its own, with finish "abort"."""
        ended = (core.scheduler.abort(id) for id in ids)
        core.said += [output for output in ended if output is not None]

    def count_ended(outputs: dict[FinishReason, int]) -> None:
        """A request of many inner ones has ended: how many outputs it has, by how each ended."""
        for finish, count in outputs.items():
            core.scheduler.finished[finish] += count

    named = (reset_prefix_cache, stats, collective_rpc, set_weights, abort_client, requests, end, count_ended)  # fmt: skip
    return {f.__name__: f for f in named}
