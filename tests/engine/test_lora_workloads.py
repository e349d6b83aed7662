"""Random workloads on the toy device with adapters that are loaded, reloaded, unloaded, evicted, and sometimes unreadable.

Every output equals the reference for the version of its adapter at the request's arrival, and the device has that version in
memory in every step of the request.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import workload
from toy_device import ToyDevice

from quire.engine import sleep
from quire.engine.core import EngineCore
from quire.features.lora import control
from quire.features.lora.feature import LoraFeature
from quire.features.lora.gate import LoraGate
from quire.features.lora.registry import LoraRegistry
from quire.protocol.output import EngineOutput, Reply
from quire.protocol.plan import StepPlan
from quire.protocol.request import Abort, Call, EngineRequest
from quire.scheduler.request import Request

NAMES = ("one", "two", "three", "four", "five")
CONTENTS = ("a", "b", "c", "dd", "eee")
"""Of files; each is its own version, and makes its own tokens."""


BEGIN = 12
"""Turns before the first request; adapters are loaded first."""


class AdapterDevice:
    """The adapters of the toy device: files by path, what is read, and what is in memory."""

    def __init__(self, setting: workload.Setting, draw: random.Random):
        self.device, self.scheduler, self.draw = setting.device, setting.scheduler, draw
        self.sleep = setting.device.call
        self.files: dict[str, str] = {}
        self.unreadable = 0.0
        self.now = 0
        self.tickets: dict[
            int, tuple[int, str, str]
        ] = {}  # turn at which it is read, version, error
        self.loaded: dict[int, str] = {}

    def call(self, name: str, *args: Any) -> list[Any]:
        if name.endswith("_worker"):  # sleep
            return self.sleep(name, *args)
        self.device.run_all()  # a call comes after the steps that were launched before it
        return [getattr(self, name)(*args)]

    def read_adapter(self, ticket: int, path: str, version: str) -> None:
        found = self.files[path]
        fails = self.draw.random() < self.unreadable or version not in ("", found)
        error = f"{path} has changed" if fails else ""
        self.tickets[ticket] = (self.now + self.draw.choice((0, 1, 2, 9)), found, error)

    def adapters_read(self, tickets: list[int]) -> dict[int, dict[str, Any]]:
        done = {
            ticket: self.tickets[ticket]
            for ticket in tickets
            if self.tickets[ticket][0] <= self.now
        }
        return {
            ticket: {"error": error} if error else {"version": version, "rank": 1, "bytes": 1}
            for ticket, (_, version, error) in done.items()
        }

    def add_adapter(self, ticket: int, slot: int, version: str) -> bool:
        _, found, error = self.tickets.pop(ticket)
        assert (found, error) == (version, "")
        assert slot not in self.loaded
        self.loaded[slot] = version
        return True

    def discard_adapter(self, ticket: int) -> None:
        del self.tickets[ticket]

    def remove_adapter(self, slot: int) -> None:
        version = self.loaded.pop(slot)
        rows = self.device.rows.items()  # those that have left are freed by the next plan
        used = {row.kin[0] for number, row in rows if number not in self.scheduler.freed_rows}
        assert version not in used, "it is in use"


class VersionGate(LoraGate):
    """Records which version a request gets."""

    trial: Trial

    def receive(self, received: EngineRequest, number: int) -> EngineRequest:
        known = super().receive(received, number)
        trial = self.trial
        if received.adapter is not None:
            trial.arrived += 1
            assert known.adapter in CONTENTS
        trial.setting.device.kin[known.id] = (known.adapter, known.salt)
        trial.check.asked[known.id] = known
        return known


class LateLoraGate(workload.LateGate):
    """Requests that an adapter holds back need not move."""

    lora: LoraGate

    def __init__(self, late: workload.LateGate):
        super().__init__()
        self.ready_at = late.ready_at

    def ready(self, request: Request) -> bool:
        return super().ready(request) and not self.lora.is_blocking(request)


class Trial:
    """One random workload."""

    def __init__(self, seed: int):
        self.draw = random.Random(~seed ^ 7)
        self.setting = s = workload.draw_setting(seed)
        workload.draw_requests(s)
        self.replies: dict[int, Reply] = {}
        self.refused: dict[str, str] = {}
        self.calls: dict[int, tuple[str, str, str]] = {}
        self.arrived = self.failed = 0
        self.check = workload.Check(s)
        self.device = AdapterDevice(s, self.draw)
        self._watch(s.device)
        core, self.slots = s.core, self.draw.randint(1, 4)
        self.max_loras = self.draw.randint(1, self.slots)
        core.executor.call = self.device.call  # type: ignore[method-assign]
        self.registry = LoraRegistry(
            self.device.call, self.slots, lambda: None, lambda: core.state == "awake"
        )
        self.registry._tick = lambda: None  # type: ignore[method-assign]
        gate = VersionGate(self.registry, self.max_loras)
        gate.trial, self.late = self, s.late
        s.late = s.witness.late = LateLoraGate(self.late)
        s.late.lora = gate
        s.witness.enter = lambda request: None  # type: ignore[method-assign]
        gates = core.scheduler.gates
        gates[:] = [each for each in gates if each is not s.gate]
        gates.append(gate)
        self.gate = gate
        core.functions |= sleep.control_calls(core)
        core.functions |= control.control_calls(core, self.registry)
        feature: Any = object.__new__(LoraFeature)  # needs no configuration
        feature.registry = self.registry
        core.listeners.append(feature)
        for asked in s.arrivals:
            if asked.adapter is not None:
                asked.adapter = self.draw.choice(NAMES[: self.draw.randint(1, 5)])
        self.device.unreadable = self.draw.choice((0, 0.5))

    def _watch(self, device: ToyDevice) -> None:
        """Every plan's rows have their adapters in memory."""
        run = device._run

        def checked(plan: StepPlan) -> None:
            run(plan)
            for item in plan.work:
                version = device.rows[item.row].kin[0]
                assert version is None or version in self.device.loaded.values(), "not in memory"

        device._run = checked  # type: ignore[method-assign]

    # -- one turn
    def act(self) -> None:
        draw, core = self.draw, self.setting.core
        if draw.random() < (0.15 if self.device.now > BEGIN else 0.7):
            name = draw.choice(NAMES)
            path = f"{name}/{draw.randrange(3)}"
            self.device.files.setdefault(path, draw.choice(CONTENTS))
            if draw.random() < 0.1:
                self.device.files[path] = draw.choice(CONTENTS)
            number, inplace, absent = len(self.calls) + 1, draw.random() < 0.6, draw.random() < 0.2
            self.calls[number] = ("load", name, path)
            core.inbox.put(Call(number, "load_lora", [name, path, inplace, None, absent]))
        elif draw.random() < 0.05:
            number, name = len(self.calls) + 1, draw.choice(NAMES)
            self.calls[number] = ("unload", name, "")
            core.inbox.put(Call(number, "unload_lora", [name]))
        self.device.now += 1
        self.registry._reports = True

    def take(self, messages: list[Any]) -> list[EngineOutput]:
        """Handle replies, and the ends of requests that adapters cause; returns the other outputs."""
        rest = []
        for message in messages:
            if isinstance(message, Reply):
                self.replies[message.id] = message
            elif message.error_kind == "invalid":
                self.refused[message.id] = message.error
                self.check.finish[message.id] = "error"
                self.failed += "has changed" in message.error
                assert "changed" in message.error or "does not exist" in message.error
            else:
                rest.append(message)
        return rest

    def inspect(self) -> None:
        running = {r.adapter for r in self.setting.scheduler.running if r.adapter}
        assert len(running) <= self.max_loras
        assert len(self.device.loaded) <= self.slots
        ready = {v.slot: v.key for v in self.registry.versions.values() if v.state == "ready"}
        assert ready == self.device.loaded
        assert running <= set(ready.values())

    def run(self) -> None:
        s, rng = self.setting, self.setting.rng
        core: EngineCore = s.core
        take = self.check.take
        self.check.take = lambda outputs: take(self.take(outputs))  # type: ignore[method-assign]
        to_come, spins = list(s.arrivals), 0
        while (
            to_come
            or s.scheduler.has_work
            or core.in_flight
            or len(self.replies) < len(self.calls)
            or self.device.tickets  # the request that needs this adapter was aborted
        ):
            if to_come or spins < 60:
                self.act()
            else:
                self.device.now, self.registry._reports = self.device.now + 1, True
            self.inspect()
            while to_come and rng.random() < 0.4 and spins > BEGIN:
                core.inbox.put(to_come.pop(0))
            if rng.random() < 0.01:
                core.inbox.put(Abort([rng.choice(s.arrivals).id]))
            if rng.random() < 0.01:
                self.nap()
            self.late.now = s.late.now = s.late.now + 1
            names = dict(self.registry.names)
            workload.moves(s, self.check)
            self.inspect()
            if names == self.registry.names:
                assert spins < 20_000, "no progress"
            spins += 1
        for name in list(self.registry.names):
            self.registry.unload(name)

    def nap(self) -> None:
        s = self.setting
        s.witness.awake = False
        s.core.functions["sleep"](1)
        assert not self.device.loaded
        s.witness.awake = True
        self.check.take(s.core.outbox)
        s.core.outbox.clear()
        s.device.memory = [None] * len(s.device.memory)
        if s.device.states is not None:
            s.device.states.lose()
        s.core.functions["wake_up"]()

    def finish(self) -> None:
        s = self.setting
        for id in self.refused:
            self.check.asked.pop(id, None)
        self.check.done()
        s.core.idle = False
        s.scheduler.check()
        assert len(s.pool.free) == s.pool.usable, "blocks leaked"
        assert not self.gate.active, "the gate was not told that everybody left"
        assert not self.gate._deferred
        assert not self.registry.versions, "a version leaked"
        assert not self.device.loaded, "an adapter leaked"
        assert not self.device.tickets, "a reading leaked"
        assert sorted(self.registry._free) == list(range(self.slots))


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_requests_get_the_adapter_of_their_arrival(first: int) -> None:
    logging.disable(logging.CRITICAL)
    arrived = failed = refused = 0
    try:
        for seed in range(first, first + 50):
            trial = Trial(seed)
            trial.run()
            trial.finish()
            arrived, failed = arrived + trial.arrived, failed + trial.failed
            refused += len(trial.refused)
    finally:
        logging.disable(logging.NOTSET)
    assert arrived > 50
    assert failed
    assert refused > failed
