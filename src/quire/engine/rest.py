"""An engine that rests: one that holds requests back, and one that has given its memory back as well.

Knows the scheduler, and that the workers can put their memory away (`worker/rest.py`). Requests that come
meanwhile wait in line, whichever front room they come through. A `Hold` stands among the scheduler's gates only while it
holds somebody back: an engine at work does not pay for it.

    hold -> [what runs ends, or is ended, or stands still] -> sleep -> wake_up, in parts or at once
         `---------------------------------------------------------------> resume
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire.engine.core import EngineCore
from quire.errors import ValidationError
from quire.observe.rows import STATES
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

MODES = ("abort", "wait", "keep")
"""What becomes of requests that are here: they are ended, they end by themselves, or they stand still and go on later."""

PARTS = ("weights", "kv_cache")
TAGS = (*PARTS, "scheduling")

PAUSE, SLEEP = "pause", "sleep"
LOOK_EVERY_S = 0.02


class Hold(Gate):
    """Lets those go on that came before request number `until`, and nobody else."""

    name = "hold"

    def __init__(self) -> None:
        self.until = 0

    def ready(self, request: Request) -> bool:
        return request.order[1] <= self.until

    def allow(self, request: Request, num_tokens: int) -> int:
        return num_tokens if self.ready(request) else 0


class Rest:
    """How deep an engine rests, and why."""

    def __init__(self, core: EngineCore):
        self.core, self.gate = core, Hold()
        self.reasons: set[str] = set()
        self.away: set[str] = set()
        """TAGS that must be back before work goes on."""
        self.level = -1

    # -- holding back ---------------------------------------------------------------------------
    def hold(self, mode: str, reason: str = PAUSE) -> int:
        """Admit nobody from now on; how many are still to end (`left` says it again)."""
        core, scheduler = self.core, self.core.scheduler
        until = scheduler.arrivals if checked_mode(mode) == "wait" else 0
        if not self.reasons:
            self.gate.until = until
            scheduler.gates.append(self.gate)
        self.gate.until = min(self.gate.until, until)
        self.reasons.add(reason)
        if mode == "abort":
            core.settle()
            ended = (scheduler.abort(id) for id in list(scheduler.requests))
            core.said += [output for output in ended if output is not None]
        return self.left()

    def left(self) -> int:
        """How many of those who may go on are not done."""
        if not self.reasons:
            return 0
        return sum(map(self.gate.ready, self.core.scheduler.requests.values()))

    def resume(self, reason: str = PAUSE) -> bool:
        """Take that reason back; whether work goes on."""
        if reason in self.reasons:
            self.reasons.remove(reason)
            if not self.reasons:
                self.core.scheduler.gates.remove(self.gate)
        return not self.reasons

    def is_paused(self) -> bool:
        return bool(self.reasons)

    # -- giving memory back ---------------------------------------------------------------------
    def sleep(self, level: int) -> None:
        """Give memory back, at once: whoever still runs is set back, and computed again after the end of it.

        Level 0 gives nothing back, 1 the KV cache, 2 the weights as well.
        """
        core, level = self.core, checked_level(level)
        self.hold("keep", SLEEP)
        try:
            core.settle()
            if level:
                core.scheduler.set_back_all()
                if not core.scheduler.kv.reset():
                    raise RuntimeError("blocks are in use though nobody runs")
                core.executor.call("put_away", level)
        except Exception:
            if not self.away:  # it does not sleep, so nobody will think of waking it up
                self.resume(SLEEP)
            raise
        self.away |= set(PARTS) if level else {"scheduling"}
        self._be(max(self.level, level))

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Take parts back, or all; what is still away. With the last of them work goes on."""
        wanted = set(checked_tags(tags))
        if parts := sorted(wanted & self.away & set(PARTS)):
            self.core.executor.call("bring_back", parts)
        self.away -= wanted
        if not self.away:
            self._be(-1)
            self.resume(SLEEP)
        return sorted(self.away)

    def is_sleeping(self) -> bool:
        return self.level >= 0

    def _be(self, level: int) -> None:
        self.level = level
        self.core.state = STATES[
            max(level, 0)
        ]  # by level; on a CPU weights that are "offloaded" stay where they are


def functions(core: EngineCore) -> dict[str, Callable[..., Any]]:
    """What `EngineClient.call` may ask for."""
    rest = Rest(core)
    named = (rest.hold, rest.left, rest.resume, rest.is_paused, rest.sleep, rest.wake_up, rest.is_sleeping)  # fmt: skip
    return {f.__name__: f for f in named}


async def quiet(call: Callable[..., Awaitable[Any]], mode: str, reason: str = PAUSE) -> None:
    """Hold requests back, and return when nobody is left who may go on. `call`: an engine's functions.

    Who gives up waiting has not paused anything: what was held back for that reason goes on.
    """
    try:
        left = await call("hold", mode, reason)
        while left:
            await asyncio.sleep(LOOK_EVERY_S)
            left = await call("left")
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.ensure_future(call("resume", reason)))
        raise


# -- what callers may say ---------------------------------------------------------------------------
def checked_mode(mode: str) -> str:
    """Raises ValidationError."""
    if mode not in MODES:
        raise ValidationError("`mode` must be abort, wait or keep", parameter="mode", value=mode)
    return mode


def checked_level(level: int) -> int:
    """Raises ValidationError."""
    if level not in (0, 1, 2):
        raise ValidationError("`level` must be 0, 1 or 2", parameter="level", value=level)
    return level


def checked_tags(tags: Sequence[str] | None) -> Sequence[str]:
    """All of them for None or none. Raises ValidationError: one that nobody knows."""
    for tag in tags or ():
        if tag not in TAGS:
            known = ", ".join(TAGS)
            raise ValidationError(
                f"`tags` has {tag!r}; there are {known}", parameter="tags", value=tag
            )
    return tags or TAGS
