"""SleepController: pauses an engine (it admits no requests), and puts it to sleep (it also frees memory).

Knows the scheduler, and that the workers can free their memory (`worker/sleep.py`). Requests that arrive in the
meantime wait, whichever frontend they come from. The `PauseGate` is in the scheduler's list of gates only while it
blocks a request, so a working engine has no cost. `sleep_client.py` is the frontend's side.

    hold -> drained: running requests end, are aborted, or stop -> sleep -> wake_up, in parts or at once
      `-> release_hold                                            `-> pause -> resume

A hold belongs to one holder, which may release it (`release_hold`). `pause` and `sleep` turn a hold into a lasting state,
which any caller may end. When a frontend has ended, its holds are released.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.engine.core import PENDING, EngineCore
from quire.errors import ValidationError
from quire.logging import get_logger
from quire.observe.metric_table import STATES
from quire.scheduler.gate import Gate
from quire.scheduler.request import Request

log = get_logger(__name__)

MODES = ("abort", "wait", "keep")
"""What happens to the present requests: they are aborted, they finish normally, or they stop and continue later."""

PARTS = ("weights", "kv_cache")
TAGS = (*PARTS, "scheduling")

PAUSE, SLEEP = "pause", "sleep"
NO_HOLDER = ""

FILE = "sleep-state"
"""Beside the engine's folders: a new process of the engine pauses or sleeps as the old one did. Only completed operations
are kept: if the engine dies while a caller waits for a pause, the new process is not paused, and the caller gets an error."""
OF_SLEEP = ("reload_weights", "update_config")
"""Methods of the workers that `collective_rpc` calls through the controller."""

CHANGE = ("pause", "resume", "sleep", "release_kv_cache", "wake_up", *OF_SLEEP)

Functions = dict[str, Callable[..., Any]]


class PauseGate(Gate):
    """Lets the requests up to arrival number `until` go on, and blocks all others."""

    name = "hold"
    order = 100

    def __init__(self) -> None:
        self.until = 0

    def ready(self, request: Request) -> bool:
        return request.number <= self.until

    def allow(self, request: Request, start: int, num_tokens: int) -> int:
        return num_tokens if self.ready(request) else 0


class PauseHolder(NamedTuple):
    """One holder's hold."""

    reason: str
    until: int
    """The arrival number of the last request that may go on."""
    client: int
    """The frontend of the holder."""


class SleepController:
    """Whether the engine is paused or asleep, how deeply, and why."""

    def __init__(self, core: EngineCore):
        self.core, self.gate = core, PauseGate()
        self.holds: dict[str, PauseHolder] = {}
        """The holds, by holder."""
        self.lasting: set[str] = set()
        """The lasting reasons to block all requests, which have no holder."""
        self.missing_parts: set[str] = set()
        """The TAGS that must return before work goes on."""
        self.level = -1
        self.config_update: list[Any] = []
        """Arguments and keywords of the last `update_config`."""

    # -- pause ----------------------------------------------------------------------------------
    def hold(self, mode: str, reason: str = PAUSE, holder: str = NO_HOLDER) -> int:
        """Admit no more requests; returns how many must still end (see `drained`)."""
        core, scheduler = self.core, self.core.scheduler
        until = scheduler.arrivals if checked_mode(mode) == "wait" else 0
        self.holds[holder] = PauseHolder(reason, until, core.current_call.client)
        self._set_gate()
        if mode == "abort":
            core.settle()
            ended = (scheduler.abort(id) for id in list(scheduler.requests))
            core.outbox += [output for output in ended if output is not None]
        return self._num_unfinished()

    def drained(self, holder: str = NO_HOLDER) -> Any:
        """Answered when all requests that may go on have ended: True. False: the hold is gone, since a caller resumed,
        or the holder gave up."""
        if holder not in self.holds:
            return False
        return PENDING if self._num_unfinished() else True

    def _num_unfinished(self) -> int:
        return sum(map(self.gate.ready, self.core.scheduler.requests.values()))

    def release_hold(self, holder: str = NO_HOLDER) -> None:
        """Release one holder's hold; others may remain."""
        self.holds.pop(holder, None)
        self._set_gate()

    def release_client(self, number: int) -> None:
        """Release the holds of a frontend that is gone."""
        self.holds = {holder: hold for holder, hold in self.holds.items() if hold.client != number}
        self._set_gate()

    def pause(self, holder: str = NO_HOLDER) -> bool:
        """Turn the holder's hold into a pause that lasts until `resume`; False: the hold is gone."""
        return self._make_lasting(PAUSE, holder)

    def resume(self, reason: str = PAUSE) -> bool:
        """End all blocking for that reason. Returns whether work goes on."""
        self.lasting.discard(reason)
        self.holds = {holder: hold for holder, hold in self.holds.items() if hold.reason != reason}
        self._set_gate()
        return not self.is_paused()

    def is_paused(self) -> bool:
        return bool(self.lasting or self.holds)

    def _make_lasting(self, reason: str, holder: str) -> bool:
        if self.holds.pop(holder, None) is None:
            return False
        self.lasting.add(reason)
        self._set_gate()
        return True

    def _set_gate(self) -> None:
        """Set the gate to the strictest hold."""
        gates = self.core.scheduler.gates
        if not self.is_paused():
            if self.gate in gates:
                gates.remove(self.gate)
                for listener in self.core.listeners:
                    listener.on_resume()
            return
        untils = (hold.until for hold in self.holds.values())
        self.gate.until = 0 if self.lasting else min(untils)
        if self.gate not in gates:
            gates.append(self.gate)
            for listener in self.core.listeners:
                listener.on_pause()

    # -- free memory ----------------------------------------------------------------------------
    def sleep(self, level: int, holder: str | None = None) -> bool:
        """Free memory at once: running requests are preempted, and computed again after waking up.

        Level 0 frees nothing. Level 1 frees the KV cache and moves the weights to host memory. Level 2 frees both.
        False: the hold of `holder` is gone, and the engine does not sleep.
        """
        core, level = self.core, checked_level(level)
        if holder is not None and holder not in self.holds:
            return False
        holder = holder or NO_HOLDER
        self.hold("keep", SLEEP, holder)
        try:
            core.settle()
            if level:
                self._sleep_workers(level)
        except Exception:
            # otherwise the engine would stay blocked, since its callers do not see it as asleep
            self.release_hold(holder)
            raise
        self._make_lasting(SLEEP, holder)
        self.missing_parts |= set(PARTS) if level else {"scheduling"}
        self._set_level(max(self.level, level))
        for listener in core.listeners:
            listener.on_sleep(level)
        return True

    def release_kv_cache(self) -> str | None:
        """Free only the KV cache, until `wake_up`. Returns the reason if it is not possible."""
        if not self.lasting:
            return "releasing the KV cache needs a paused or sleeping engine: pause it first, or sleep at level 0"
        if freed := sorted(self.missing_parts & set(PARTS)):
            return f"the engine has already released memory ({', '.join(freed)}): call wake_up to restore it"
        self.core.settle()
        self._sleep_workers(0)
        self.lasting.add(SLEEP)
        self._set_gate()
        self.missing_parts = {"kv_cache"}
        self._set_level(0)
        return None

    def _sleep_workers(self, level: int) -> None:
        scheduler = self.core.scheduler
        scheduler.preempt_all()
        if not scheduler.kv.reset():
            raise RuntimeError("KV blocks are in use although no request runs")
        for listener in self.core.listeners:
            listener.on_cache_reset()
        self.core.executor.call("sleep_worker", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> list[str]:
        """Restore some parts, or all. Returns those still missing; after the last one, work goes on."""
        requested = set(checked_tags(tags))
        if parts := sorted(requested & self.missing_parts & set(PARTS)):
            self.core.executor.call("wake_up_worker", parts)
            for listener in self.core.listeners:
                listener.on_wake_up(parts)
        self.missing_parts -= requested
        if not self.missing_parts:
            self._set_level(-1)
            self.resume(SLEEP)
        return sorted(self.missing_parts)

    def is_sleeping(self) -> bool:
        return self.level >= 0

    # -- load weights again ---------------------------------------------------------------------
    def reload_weights(self, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Load the weights on every worker again; a sleeping engine goes on sleeping.

        An engine that is awake preempts its requests and drops the KV cache, which the old weights computed: requests are
        computed again with the new weights. If loading fails, the engine stays asleep at level 2.
        """
        if args or kwargs:
            raise ValidationError("reload_weights takes no arguments", parameter="args")
        is_awake = not self.missing_parts
        if is_awake:
            self.sleep(2)
        answers = list(self.core.executor.call("collective_rpc", "reload_weights", [], {}))
        if is_awake:
            self.wake_up()
        return answers

    def update_config(self, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Set on every worker the load format of later loads (`worker/load_format.py`)."""
        answers = self.core.executor.call("collective_rpc", "update_config", args, kwargs)
        self.config_update = [args, kwargs]
        return list(answers)

    # -- across restarts ------------------------------------------------------------------------
    def saved_state(self) -> dict[str, Any]:
        """The sleep state, for `restore_state` in another process."""
        missing = sorted(self.missing_parts)
        state = {"paused": PAUSE in self.lasting, "level": self.level, "missing_parts": missing}
        return state | ({"config_update": self.config_update} if self.config_update else {})

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore the sleep state that `saved_state` of another process returned; this engine has no requests yet."""
        if update := state.get("config_update"):
            self.update_config(*update)
            self.reload_weights([], {})
        if state["paused"]:
            self.lasting.add(PAUSE)
            self._set_gate()
        if state["level"] >= 0:
            self.sleep(state["level"])
            if state["level"] == 0 and "kv_cache" in state["missing_parts"]:
                self.release_kv_cache()
            if restored := self.missing_parts - set(state["missing_parts"]):
                self.wake_up(sorted(restored))

    def _set_level(self, level: int) -> None:
        self.level = level
        # by level; on a CPU, "offloaded" weights stay where they are
        self.core.state = STATES[max(level, 0)]


def control_calls(core: EngineCore) -> Functions:
    """The functions for `EngineClient.call`."""
    controller = SleepController(core)
    names = (
        "hold", "drained", "release_hold", "release_client", "pause", "resume", "is_paused", "sleep",
        "release_kv_cache", "wake_up", "is_sleeping", "saved_state", "restore_state", *OF_SLEEP,
    )  # fmt: skip
    return {name: getattr(controller, name) for name in names}


# -- across restarts of the process -----------------------------------------------------------------
def restore_sleep_state(functions: Functions, path: Path) -> None:
    """Restore the sleep state that an earlier process of the engine wrote."""
    if path.exists():
        state = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        functions["restore_state"](state)
        if state["paused"] or state["level"] >= 0:
            log.warning("restored the sleep state of the previous engine process: %s", state)


def persisting(functions: Functions, path: Path) -> Functions:
    """The same functions; those that change the sleep state write it to `path` before they return."""

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            finally:
                try:
                    new = path.with_suffix(".new")
                    new.write_bytes(msgspec.json.encode(functions["saved_state"]()))
                    os.replace(new, path)
                except OSError as why:
                    log.warning("a restarted engine will not restore this sleep state: %s", why)

        return call

    return functions | {name: keeping(functions[name]) for name in CHANGE}


# -- validation -------------------------------------------------------------------------------------
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
    """All tags for None or an empty list. Raises ValidationError: an unknown tag."""
    for tag in tags or ():
        if tag not in TAGS:
            known = ", ".join(TAGS)
            raise ValidationError(
                f"`tags` has {tag!r}; choose from {known}", parameter="tags", value=tag
            )
    return tags or TAGS
