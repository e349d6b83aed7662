"""The named functions of an engine, for `EngineClient.call`.

Knows the core and its executor. Arguments and results are builtins, so that they can cross a process boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.engine.core import EngineCore
from quire.engine.sleep import OF_SLEEP
from quire.protocol.output import FinishReason


def control_calls(core: EngineCore) -> dict[str, Callable[..., Any]]:
    """The functions by name; `build.py` adds the features' functions."""

    def reset_prefix_cache(running: bool = False) -> bool:
        """Empty the prefix cache; False if some blocks were in use and stay. `running`: preempt the running requests
        first, so that they use none; they are computed again."""
        if running:
            core.settle()
            core.scheduler.preempt_all()
        is_empty = core.scheduler.kv.reset()
        for listener in core.listeners:
            listener.on_cache_reset()
        return is_empty

    def stats() -> dict[str, Any]:
        """An EngineStats as builtins."""
        return dict(msgspec.structs.asdict(core.stats()))

    def collective_rpc(method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of every worker; returns one result for each."""
        if method in OF_SLEEP:
            return list(core.functions[method](args, kwargs))
        return list(core.executor.call("collective_rpc", method, args, kwargs))

    def abort_client(number: int) -> int:
        """End every request of a frontend that is gone, without outputs. Returns how many there were."""
        scheduler = core.scheduler
        ids = [id for id, request in scheduler.requests.items() if request.client == number]
        for id in ids:
            scheduler.abort(id)
        return len(ids)

    def requests() -> list[str]:
        """Ids of all waiting and running requests."""
        return list(core.scheduler.requests)

    def end(ids: list[str]) -> None:
        """End these requests; each frontend gets outputs for its own, with finish "abort"."""
        ended = (core.scheduler.abort(id) for id in ids)
        core.outbox += [output for output in ended if output is not None]

    def withdraw(ids: list[str], count: int) -> list[str]:
        """Remove up to `count` of these requests that no step has computed yet, the next ones first, without outputs and
        without counting their end: another engine gets them. Returns their ids."""
        scheduler, candidates, withdrawn = core.scheduler, set(ids), list[str]()
        for request in list(scheduler.waiting):
            if len(withdrawn) == count:
                break
            if request.id in candidates and request.queued < 0:
                request.is_subrequest = True
                scheduler.abort(request.id)
                withdrawn.append(request.id)
        return withdrawn

    def count_ended(outputs: dict[FinishReason, int]) -> None:
        """Count the end of a request that consisted of many inner ones: its number of outputs by finish reason."""
        for finish, count in outputs.items():
            core.scheduler.finished[finish] += count

    named = (reset_prefix_cache, stats, collective_rpc, abort_client, requests, end, withdraw, count_ended)  # fmt: skip
    return {f.__name__: f for f in named}
