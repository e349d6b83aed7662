"""An engine that holds requests back or sleeps, on the toy device: who goes on, who waits, and with which tokens."""

from __future__ import annotations

import asyncio
import random

import pytest
from test_client import Device
from workload import reference

from quire.engine import admin, rest
from quire.engine.core import EngineCore
from quire.kvcache.manager import KVManager
from quire.kvcache.pool import BlockPool
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineOutput, Reply
from quire.protocol.params import SamplingParams
from quire.protocol.request import Call, EngineRequest
from quire.scheduler.scheduler import Limits, Scheduler


class Engine:
    """A core two steps deep, with a row less than it has requests."""

    def __init__(self) -> None:
        groups = [CacheGroup(CacheSpec(1, 1, 1, 1), (0,))]
        self.device = Device(groups, 101, 4, 0, random.Random(1))
        limits = Limits(max_rows=2, max_step_tokens=16, max_length=60, depth=2)
        scheduler = Scheduler(KVManager(BlockPool(101), groups, 4), limits)
        self.core = core = EngineCore(scheduler, self.device, 2)
        core.check_each_step = True
        core.functions |= admin.functions(core) | rest.functions(core)
        self.asked: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str | None] = {}

    def ask(self, *ids: str) -> None:
        for id in ids:
            self.asked[id] = EngineRequest(id, [len(id), 2, 3], SamplingParams(max_tokens=12))
            self.tokens[id], self.finish[id] = [], None
            self.device.kin[id] = (None, "")
            self.core.inbox.put(self.asked[id])

    def call(self, name: str, *args: object) -> object:
        self.core.inbox.put(Call(1, name, list(args)))
        *outputs, reply = self.core.receive(block=False)
        self.take(outputs)
        assert isinstance(reply, Reply)
        assert reply.error is None, reply.error
        return reply.value

    def run(self, steps: int = 1000) -> None:
        """So many steps, or until it rests."""
        self.take(self.core.receive(block=False))
        for _ in range(steps):
            self.take(self.core.step())
            if self.core.idle:
                return

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.tokens[output.id] += output.tokens
            self.finish[output.id] = output.finish or self.finish[output.id]

    def is_right(self, *ids: str) -> bool:
        return all(
            self.finish[id] == "length" and self.tokens[id] == reference(self.asked[id])[0]
            for id in ids
        )


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.ask("a", "bb", "ccc")  # two run and one waits
    made.run(6)
    assert made.core.in_flight
    assert made.tokens["a"]
    assert not made.tokens["ccc"]
    return made


def test_wait_lets_those_end_that_were_here(engine: Engine) -> None:
    assert engine.call("hold", "wait") == 3
    engine.ask("dddd")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")
    assert engine.call("left") == 0
    assert engine.call("is_paused") is True
    assert not engine.tokens["dddd"]
    assert engine.core.stats().deferred == 1
    assert engine.call("resume") is True
    engine.run()
    assert engine.is_right("dddd")
    assert not engine.core.scheduler.gates


def test_abort_ends_all_and_tells_all(engine: Engine) -> None:
    known = len(engine.tokens["a"])
    engine.ask("dddd")
    assert engine.call("hold", "abort") == 0
    assert set(engine.finish.values()) == {"abort"}
    assert not engine.core.in_flight
    assert len(engine.tokens["a"]) > known  # what was in flight came out first
    assert engine.tokens["a"] == reference(engine.asked["a"])[0][: len(engine.tokens["a"])]


def test_keep_stands_still(engine: Engine) -> None:
    assert engine.call("hold", "keep") == 0
    engine.run()
    before = {id: list(tokens) for id, tokens in engine.tokens.items()}
    engine.run()
    assert engine.tokens == before
    assert engine.core.scheduler.running
    engine.call("resume")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_after_sleep_the_same_tokens(engine: Engine, level: int) -> None:
    engine.call("sleep", level)
    assert not engine.core.in_flight
    assert engine.core.state == ("awake", "weights_offloaded", "discard_all")[level]
    if level:
        assert not engine.core.scheduler.running
        engine.device.memory = [None] * len(engine.device.memory)  # nothing of it may be read
    engine.ask("dddd")
    engine.run()
    assert not engine.tokens["dddd"]
    assert engine.call("resume") is False  # nobody paused: it still sleeps
    if level:
        assert engine.call("wake_up", ["weights"]) == ["kv_cache"]
        assert engine.call("is_sleeping") is True
    assert engine.call("wake_up") == []
    assert engine.call("is_sleeping") is False
    assert engine.core.state == "awake"
    engine.run()
    assert engine.is_right("a", "bb", "ccc", "dddd")
    engine.core.scheduler.check()


def test_a_pause_outlasts_a_sleep(engine: Engine) -> None:
    engine.call("hold", "keep")
    engine.call("sleep", 1)
    engine.call("wake_up")
    engine.run()
    assert engine.call("is_paused") is True
    assert not engine.finish["a"]
    engine.call("resume")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


def test_who_gives_up_waiting_has_paused_nothing(engine: Engine) -> None:
    async def call(name: str, *args: object) -> object:
        return engine.call(name, *args)

    async def main() -> None:
        for reason in (rest.PAUSE, rest.SLEEP):
            with pytest.raises(asyncio.TimeoutError):  # nobody steps, so they never end
                await asyncio.wait_for(rest.quiet(call, "wait", reason), 0.05)
            assert await call("is_paused") is False, reason

    asyncio.run(main())
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


def test_what_workers_are_told(engine: Engine) -> None:
    told: list[tuple[object, ...]] = []
    engine.device.call = lambda *words: told.append(words) or [None]  # type: ignore[method-assign]
    engine.call("sleep", 0)
    engine.call("sleep", 1)
    engine.call("sleep", 2)
    engine.call("sleep", 1)
    assert engine.core.state == "discard_all"
    engine.call("wake_up", ["kv_cache", "scheduling"])
    engine.call("wake_up", None)
    assert told == [
        ("put_away", 1), ("put_away", 2), ("put_away", 1),
        ("bring_back", ["kv_cache"]), ("bring_back", ["weights"]),
    ]  # fmt: skip


def test_some_are_ended_by_id(engine: Engine) -> None:
    assert engine.call("requests") == ["a", "bb", "ccc"]
    engine.call("end", ["bb", "gone"])
    assert engine.finish == {"a": None, "bb": "abort", "ccc": None}
    engine.run()
    assert engine.is_right("a", "ccc")


def test_a_sleep_that_fails_holds_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Whoever asked for it was told that it failed, and all requests waited for ever.)"""

    def fails(name: str, *args: object) -> list[None]:
        raise MemoryError("no room on the host")

    monkeypatch.setattr(engine.device, "call", fails)
    engine.core.inbox.put(Call(1, "sleep", [1]))
    *outputs, reply = engine.core.receive(block=False)
    engine.take(outputs)
    assert isinstance(reply, Reply)
    assert reply.error == "MemoryError: no room on the host"
    assert not engine.call("is_sleeping")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")
