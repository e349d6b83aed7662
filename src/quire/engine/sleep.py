"""An engine that rests: one that holds requests back, and one that has given its memory back as well.

Knows the scheduler, and that the workers can put their memory away (`worker/sleep.py`). Requests that come
meanwhile wait in line, whichever front room they come through. A `PauseGate` stands among the scheduler's gates only while it
holds somebody back: an engine at work does not pay for it. How a front room waits for it is `sleep_client.py`'s.

    hold -> [what runs ends, or is ended, or stands still] -> sleep -> wake_up, in parts or at once
      `-> let_go                                         `-> pause -> resume

What is held is somebody's, who may let go of it, until it stands: then whoever wants ends it. What a front room held that is
gone, nobody holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.engine.core import EngineCore
from quire.errors import ValidationError
from quire.observe.metric_table import STATES
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

MODES = ("abort", "wait", "keep")
"""What becomes of requests that are here: they are ended, they end by themselves, or they stand still and go on later."""

PARTS = ("weights", "kv_cache")
TAGS = (*PARTS, "scheduling")

PAUSE, SLEEP = "pause", "sleep"
NOBODY = ""


class PauseGate(Gate):
    """Lets those go on that came before request number `until`, and nobody else."""

    name = "hold"

    def __init__(self) -> None:
        self.until = 0

    def ready(self, request: Request) -> bool:
        return request.order[1] <= self.until

    def allow(self, request: Request, num_tokens: int) -> int:
        return num_tokens if self.ready(request) else 0


class PauseHolder(NamedTuple):
    """What one holds back."""

    reason: str
    until: int
    """The last arrival that goes on."""
    client: int
    """Through which front room."""


class SleepController:
    """How deep an engine rests, and why."""

    def __init__(self, core: EngineCore):
        self.core, self.gate = core, PauseGate()
        self.held: dict[str, PauseHolder] = {}
        """By who holds requests back."""
        self.standing: set[str] = set()
        """Why all are held back, whoever asked for it."""
        self.away: set[str] = set()
        """TAGS that must be back before work goes on."""
        self.level = -1

    # -- holding back ---------------------------------------------------------------------------
    def hold(self, mode: str, reason: str = PAUSE, holder: str = NOBODY) -> int:
        """Admit nobody from now on; how many are still to end (`left` says it again)."""
        core, scheduler = self.core, self.core.scheduler
        until = scheduler.arrivals if checked_mode(mode) == "wait" else 0
        self.held[holder] = PauseHolder(reason, until, core.caller)
        self._set_gate()
        if mode == "abort":
            core.settle()
            ended = (scheduler.abort(id) for id in list(scheduler.requests))
            core.said += [output for output in ended if output is not None]
        return self._left()

    def left(self, holder: str = NOBODY) -> int | None:
        """How many of those who may go on are not done; None: it is held no more, somebody resumed."""
        return self._left() if holder in self.held else None

    def _left(self) -> int:
        return sum(map(self.gate.ready, self.core.scheduler.requests.values()))

    def let_go(self, holder: str = NOBODY) -> None:
        """Who has given up holds nobody back; others may."""
        self.held.pop(holder, None)
        self._set_gate()

    def let_go_client(self, number: int) -> None:
        """A front room is gone, and with it who waited there."""
        self.held = {who: held for who, held in self.held.items() if held.client != number}
        self._set_gate()

    def pause(self, holder: str = NOBODY) -> bool:
        """What he holds is held until `resume`; False: it is held no more."""
        return self._stand(PAUSE, holder)

    def resume(self, reason: str = PAUSE) -> bool:
        """Hold nobody back for that reason; whether work goes on."""
        self.standing.discard(reason)
        self.held = {who: held for who, held in self.held.items() if held.reason != reason}
        self._set_gate()
        return not self.is_paused()

    def is_paused(self) -> bool:
        return bool(self.standing or self.held)

    def _stand(self, reason: str, holder: str) -> bool:
        if self.held.pop(holder, None) is None:
            return False
        self.standing.add(reason)
        self._set_gate()
        return True

    def _set_gate(self) -> None:
        """As the strictest of them wants it."""
        gates = self.core.scheduler.gates
        if not self.is_paused():
            if self.gate in gates:
                gates.remove(self.gate)
            return
        untils = (held.until for held in self.held.values())
        self.gate.until = 0 if self.standing else min(untils)
        if self.gate not in gates:
            gates.append(self.gate)

    # -- giving memory back ---------------------------------------------------------------------
    def sleep(self, level: int, holder: str | None = None) -> bool:
        """Give memory back, at once: whoever still runs is set back, and computed again after the end of it.

        Level 0 gives nothing back, 1 the KV cache, 2 the weights as well. False: `holder` holds nobody back any
        more, and it does not sleep.
        """
        core, level = self.core, checked_level(level)
        if holder is not None and holder not in self.held:
            return False
        holder = holder or NOBODY
        self.hold("keep", SLEEP, holder)
        try:
            core.settle()
            if level:
                self._put_away(level)
        except Exception:
            self.let_go(holder)  # nobody would think of waking it up
            raise
        self._stand(SLEEP, holder)
        self.away |= set(PARTS) if level else {"scheduling"}
        self._be(max(self.level, level))
        return True

    def release_kv_cache(self) -> str | None:
        """Give back the KV cache alone, until `wake_up`; or why it is not done."""
        if not self.standing:
            return "the KV cache is given back by an engine that rests: it must be paused first, or sleep at level 0"
        if gone := sorted(self.away & set(PARTS)):
            return f"the engine has given memory back already ({', '.join(gone)}): wake_up takes it again"
        self.core.settle()
        self._put_away(0)
        self.standing.add(SLEEP)
        self._set_gate()
        self.away = {"kv_cache"}
        self._be(0)
        return None

    def _put_away(self, level: int) -> None:
        scheduler = self.core.scheduler
        scheduler.set_back_all()
        if not scheduler.kv.reset():
            raise RuntimeError("blocks are in use though nobody runs")
        self.core.executor.call("put_away", level)

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

    # -- beyond the process ---------------------------------------------------------------------
    def asked(self) -> dict[str, Any]:
        """How deep it is to rest, for `as_asked` of another process."""
        return {"paused": PAUSE in self.standing, "level": self.level, "away": sorted(self.away)}

    def as_asked(self, told: dict[str, Any]) -> None:
        """Rest as `asked` of another process told, nobody being here yet."""
        if told["paused"]:
            self.standing.add(PAUSE)
            self._set_gate()
        if told["level"] >= 0:
            self.sleep(told["level"])
            if told["level"] == 0 and "kv_cache" in told["away"]:
                self.release_kv_cache()
            if back := self.away - set(told["away"]):
                self.wake_up(sorted(back))

    def _be(self, level: int) -> None:
        self.level = level
        self.core.state = STATES[
            max(level, 0)
        ]  # by level; on a CPU weights that are "offloaded" stay where they are


def functions(core: EngineCore) -> dict[str, Callable[..., Any]]:
    """What `EngineClient.call` may ask for."""
    rest = SleepController(core)
    named = (
        rest.hold, rest.left, rest.let_go, rest.let_go_client, rest.pause, rest.resume, rest.is_paused,
        rest.sleep, rest.release_kv_cache, rest.wake_up, rest.is_sleeping, rest.asked, rest.as_asked,
    )  # fmt: skip
    return {f.__name__: f for f in named}


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
