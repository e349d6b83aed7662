"""The engine's state for the page: fetched once for any number of viewers.

Knows the answer of `observe/inspector.py`, and time. Does not know HTTP or viewers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from quire.api.async_engine import AsyncEngine

EVERY_S = 0.25
SHARE = 0.05  # of the engine's time, at most, goes into inspecting it
FRESH = 0.8  # of the interval: a viewer whose clock runs a little fast still gets a new state


class LiveFeed:
    """One for each engine of an application; created at the first request.

    Args:
        number: which of several engines; None: there is one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, number: int | None = None):
        self.clock, self.number = clock, number
        self.every = EVERY_S
        self._seen: dict[str, Any] | None = None
        self._at = 0.0
        self._asking: asyncio.Future[dict[str, Any]] | None = None

    async def look(self, engine: AsyncEngine) -> dict[str, Any]:
        """The latest state; fetched from the engine if it is old, and never twice at once."""
        if self._seen is not None and self.clock() - self._at < FRESH * self.every:
            return self._seen
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask(engine))
            self._asking.add_done_callback(self._on_answer)
        # a viewer that disconnects does not cancel it for the others
        return await asyncio.shield(self._asking)

    async def _ask(self, engine: AsyncEngine) -> dict[str, Any]:
        which = {} if self.number is None else {"engine": self.number}
        seen: dict[str, Any] = await engine.call("live", **which)
        self._seen, self._at = seen, self.clock()
        self.every = max(EVERY_S, seen["cost_ms"] / 1000 / SHARE)
        return seen

    def _on_answer(self, done: asyncio.Future[dict[str, Any]]) -> None:
        self._asking = None
        if not done.cancelled():
            done.exception()  # waiting readers get the error; there may be none


def viewer_state(seen: dict[str, Any], since: int, tenant: str) -> dict[str, Any]:
    """The state for a viewer of this tenant: steps after `since`, and other tenants' requests without details."""
    lives = [one if one["tenant"] == tenant else foreign(one) for one in seen["lives"]]
    latest = max((step["step"] for step in seen["steps"]), default=0)
    # A new engine process counts its steps from the beginning.
    steps = [step for step in seen["steps"] if step["step"] > since or since > latest]
    visible = {one["n"] for one in seen["lives"] if one["tenant"] == tenant}
    for index, step in enumerate(steps):
        work = [item if item[0] in visible else [*item[:3], 0] for item in step["work"]]
        steps[index] = step | {"work": work}
    return seen | {"lives": lives, "steps": steps}


def foreign(life: dict[str, Any]) -> dict[str, Any]:
    """Another tenant's request: its lengths would reveal what it contains."""
    visible = {key: life[key] for key in ("n", "state", "preemptions", "blocks", "ended")}
    phases = [[kind, ago, 0] for kind, ago, _ in life["phases"]]
    return visible | {"id": "", "foreign": True, "phases": phases}
