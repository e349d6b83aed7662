"""A paused or sleeping engine on the toy device: which requests continue, which wait, and with which tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import pytest
from test_client import Device
from workload import reference

from quire.engine import rpc, sleep, sleep_client
from quire.engine.core import PENDING, EngineCore
from quire.errors import Conflict
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineOutput, Reply
from quire.protocol.request import Call, EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

Rests = Callable[["Engine"], Coroutine[object, object, None]]


class Engine:
    """A core with one row fewer than requests."""

    def __init__(self, depth: int = 2) -> None:
        groups = [CacheGroup(CacheSpec(1, 1, 1, 1), (0,))]
        self.device = Device(groups, 101, 4, 0, random.Random(1))
        limits = SchedulerLimits(max_rows=2, max_step_tokens=16, max_length=60, depth=depth)
        scheduler = Scheduler(KVManager(BlockPool(101), groups, 4), limits)
        self.core = core = EngineCore(scheduler, self.device, depth)
        core.check_each_step = True
        core.functions |= rpc.control_calls(core) | sleep.control_calls(core)
        self.numbers = itertools.count(1)
        self.replies: dict[int, Reply] = {}
        self.told: list[tuple[object, ...]] = []
        self.asked: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str | None] = {}

    def ask(self, *ids: str) -> None:
        for id in ids:
            self.asked[id] = EngineRequest(id, [len(id), 2, 3], SamplingParams(max_tokens=12))
            self.tokens[id], self.finish[id] = [], None
            self.device.kin[id] = (None, "")
            self.core.inbox.put(self.asked[id])

    def send(self, name: str, *args: object, client: int = 0) -> int:
        """Call a function without waiting; the number of its reply."""
        number = next(self.numbers)
        self.core.inbox.put(Call(number, name, list(args), client))
        self.take(self.core.receive(block=False))
        return number

    def call(self, name: str, *args: object) -> object:
        reply = self.replies.pop(self.send(name, *args))
        assert reply.error is None, reply.error
        return reply.value

    def run(self, steps: int = 1000) -> None:
        """Run this number of steps, or until the engine is idle."""
        self.take(self.core.receive(block=False))
        for _ in range(steps):
            self.take(self.core.step())
            if self.core.idle:
                return

    def take(self, outputs: list[EngineOutput | Reply]) -> None:
        for output in outputs:
            if isinstance(output, Reply):
                self.replies[output.id] = output
                continue
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


def test_a_waiting_pause_finishes_running_requests(engine: Engine) -> None:
    assert engine.call("hold", "wait") == 3
    drained = engine.send("drained")
    engine.ask("dddd")
    while drained not in engine.replies:
        assert not engine.is_right("a", "bb", "ccc")
        engine.run(1)
        engine.take(engine.core.receive(block=False))
    engine.run()
    assert engine.replies[drained].value is True
    assert engine.is_right("a", "bb", "ccc")
    assert engine.call("pause") is True
    assert engine.call("is_paused") is True
    assert not engine.tokens["dddd"]
    assert engine.core.stats().deferred == 1
    assert engine.call("resume") is True
    engine.run()
    assert engine.is_right("dddd")
    assert not engine.core.scheduler.gates


def test_abort_ends_all_requests_with_an_output(engine: Engine) -> None:
    known = len(engine.tokens["a"])
    engine.ask("dddd")
    assert engine.call("hold", "abort") == 0
    assert set(engine.finish.values()) == {"abort"}
    assert not engine.core.in_flight
    assert len(engine.tokens["a"]) > known  # steps in flight finished first
    assert engine.tokens["a"] == reference(engine.asked["a"])[0][: len(engine.tokens["a"])]


def test_keep_freezes_running_requests(engine: Engine) -> None:
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
        engine.device.memory = [None] * len(engine.device.memory)  # it must not be read
    engine.ask("dddd")
    engine.run()
    assert not engine.tokens["dddd"]
    assert engine.call("resume") is False  # nothing paused it: it still sleeps
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
    engine.call("pause")
    engine.call("sleep", 1)
    engine.call("wake_up")
    engine.run()
    assert engine.call("is_paused") is True
    assert not engine.finish["a"]
    engine.call("resume")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


def asked_of(engine: Engine) -> Callable[..., Awaitable[object]]:
    async def call(name: str, *args: object) -> object:
        number = engine.send(name, *args)
        while number not in engine.replies:
            await asyncio.sleep(0)
            engine.take(engine.core.receive(block=False))
        assert engine.replies[number].error is None
        return engine.replies.pop(number).value

    return call


def pausing(engine: Engine) -> Coroutine[object, object, None]:
    return sleep_client.pause(asked_of(engine), "wait")


def sleeping(engine: Engine) -> Coroutine[object, object, None]:
    return sleep_client.sleep(asked_of(engine), 1, "wait")


async def begin(engine: Engine, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
    """Start work that waits for running requests, which make no steps."""
    task = asyncio.ensure_future(work)
    while not engine.call("is_paused"):
        await asyncio.sleep(0)
    return task


async def give_up(work: Coroutine[object, object, None]) -> None:
    with pytest.raises(asyncio.TimeoutError):  # the requests make no steps, so they never end
        await asyncio.wait_for(work, 0.05)


@pytest.mark.parametrize("rests", [pausing, sleeping])
def test_a_cancelled_wait_delays_no_other_request(engine: Engine, rests: Rests) -> None:
    async def main() -> None:
        await give_up(rests(engine))
        assert engine.call("is_paused") is False

    asyncio.run(main())
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


@pytest.mark.parametrize("second", [pausing, sleeping])
@pytest.mark.parametrize("first", [pausing, sleeping])
def test_a_cancelled_pause_does_not_end_another_pause(
    engine: Engine, first: Rests, second: Rests
) -> None:
    """Regression: a cancelled wait also ended the pause of another caller, which got the reply that it had paused."""

    async def main() -> None:
        one = await begin(engine, first(engine))
        await give_up(second(engine))
        assert engine.call("is_paused") is True
        engine.ask("dddd")
        engine.run()
        await one

    asyncio.run(main())
    assert engine.is_right("a", "bb", "ccc")
    assert engine.call("is_paused") is True
    assert engine.call("is_sleeping") is (first is sleeping)
    assert not engine.tokens["dddd"]
    engine.call("resume") if first is pausing else engine.call("wake_up")
    engine.run()
    assert engine.is_right("dddd")


def test_a_disconnected_frontend_delays_no_pause(engine: Engine) -> None:
    for number, name in ((1, "one"), (2, "two")):
        engine.send("hold", "wait", sleep.PAUSE, name, client=number)
    one, two = (
        engine.send("drained", name, client=number) for number, name in ((1, "one"), (2, "two"))
    )
    engine.call("release_client", 1)
    engine.take(engine.core.receive(block=False))
    assert engine.replies[one].value is False
    assert two not in engine.replies
    assert len(engine.core.pending_calls) == 1
    assert engine.call("is_paused") is True
    engine.call("release_client", 2)
    assert engine.call("is_paused") is False
    engine.call("hold", "wait")
    engine.call("pause")
    engine.call("release_client", 0)  # a client whose pause is complete may disconnect
    assert engine.call("is_paused") is True


def test_a_cancelled_pause_does_not_end_a_completed_one(engine: Engine) -> None:
    engine.call("hold", "keep")
    engine.call("pause")
    engine.call("hold", "wait", sleep.PAUSE, "another")
    engine.call("release_hold", "another")
    engine.run()
    assert engine.call("is_paused") is True
    assert not engine.finish["a"]


def test_a_cancelled_call_leaves_nothing_pending(engine: Engine) -> None:
    """(Its thread would wait until all requests had ended.)"""
    engine.call("hold", "wait", sleep.PAUSE, "one")
    number = engine.send("drained", "one")
    assert number not in engine.replies
    engine.call("release_hold", "one")
    engine.take(engine.core.receive(block=False))
    assert engine.replies[number].value is False
    assert not engine.core.pending_calls


def test_a_waiting_pause_sends_three_calls_at_most(engine: Engine) -> None:
    """(It asked fifty times a second.)"""
    called: list[str] = []

    async def main() -> None:
        async def call(name: str, *args: object) -> object:
            called.append(name)
            return await asked_of(engine)(name, *args)

        task = asyncio.ensure_future(sleep_client.pause(call, "wait"))
        for _ in range(50):
            await asyncio.sleep(0)
        engine.run()
        await task

    asyncio.run(main())
    assert called == ["hold", "drained", "pause"]
    assert engine.is_right("a", "bb", "ccc")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deferred_reply_is_polled_in_each_step(depth: int) -> None:
    """Any function may answer later; what it sends before comes at once, and its error is its answer."""
    engine = Engine(depth)
    core = engine.core
    asked: list[int] = []

    def countdown(start: int) -> object:
        asked.append(start)
        if len(asked) > start:
            raise ValueError("too late")
        return "now" if len(asked) == start else PENDING

    core.functions["countdown"] = countdown
    engine.ask("a")
    number = engine.send("countdown", 4)
    other = engine.send("is_paused")  # others are answered meanwhile
    assert engine.replies[other].value is False
    while number not in engine.replies:
        engine.take(core.receive(block=False))
        engine.take(core.step())
    assert engine.replies[number].value == "now"
    failing = engine.send("countdown", 3)
    assert engine.replies[failing].error == "ValueError: too late"
    engine.run()
    assert engine.is_right("a")


@pytest.mark.parametrize(
    ("rests", "end", "state"),
    [(pausing, "resume", "is_paused"), (sleeping, "wake_up", "is_sleeping")],
)
def test_a_waiting_pause_is_told_of_a_resume(
    engine: Engine, rests: Rests, end: str, state: str
) -> None:
    async def main() -> None:
        one = await begin(engine, rests(engine))
        engine.call(end)
        with pytest.raises(Conflict, match="resumed or restarted"):
            await one

    asyncio.run(main())
    assert engine.call(state) is False
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


@pytest.mark.parametrize("level", [-1, 0, 1, 2])
@pytest.mark.parametrize("back", [None, ["weights"], ["kv_cache", "scheduling"]])
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("paused", [True, False])
def test_the_next_process_rests_as_deep(
    tmp_path: Path, level: int, back: list[str] | None, paused: bool, released: bool
) -> None:
    def process() -> Engine:
        made = Engine()
        made.device.call = lambda *words: made.told.append(words) or [None]  # type: ignore[method-assign]
        sleep.restore_sleep_state(made.core.functions, tmp_path / "asked")
        made.core.functions = sleep.persisting(made.core.functions, tmp_path / "asked")
        return made

    before = process()
    if paused:
        before.call("hold", "keep")
        before.call("pause")
    if level >= 0:
        before.call("sleep", level)
        if back is not None:
            before.call("wake_up", back)
    if released:
        before.call("release_kv_cache")  # or it returns the reason
    after = process()
    for name in ("is_paused", "is_sleeping", "saved_state"):
        assert after.call(name) == before.call(name), name
    assert after.core.state == before.core.state
    after.ask("a")
    after.run()
    assert after.is_right("a") is not before.call("is_paused")
    after.call("wake_up")
    after.call("resume")
    after.run()
    assert after.is_right("a")
    assert process().call("saved_state") == {"paused": False, "level": -1, "missing_parts": []}


def test_an_unfinished_pause_is_not_restored(engine: Engine, tmp_path: Path) -> None:
    engine.core.functions = sleep.persisting(engine.core.functions, tmp_path / "asked")
    engine.call("hold", "wait")
    engine.call("resume", sleep.SLEEP)  # writes
    after = Engine()
    sleep.restore_sleep_state(after.core.functions, tmp_path / "asked")
    assert after.call("is_paused") is False


def test_workers_receive_sleep_and_wake_up_calls(engine: Engine) -> None:
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
        ("sleep_worker", 1), ("sleep_worker", 2), ("sleep_worker", 1),
        ("wake_up_worker", ["kv_cache"]), ("wake_up_worker", ["weights"]),
    ]  # fmt: skip


@pytest.mark.parametrize("rests", [("pause",), ("sleep", 0)])
def test_the_kv_cache_can_be_released_alone(engine: Engine, rests: tuple[object, ...]) -> None:
    told: list[tuple[object, ...]] = []
    engine.device.call = lambda *words: told.append(words) or [None]  # type: ignore[method-assign]
    assert "pause it first" in str(engine.call("release_kv_cache"))
    engine.call("hold", "keep")
    assert "pause it first" in str(engine.call("release_kv_cache"))  # not paused yet
    engine.call(*rests)
    if rests == ("sleep", 0):
        engine.call("release_hold")
    assert engine.call("release_kv_cache") is None
    assert not engine.core.scheduler.running
    assert "wake_up" in str(engine.call("release_kv_cache"))
    engine.device.memory = [None] * len(engine.device.memory)
    assert engine.call("is_sleeping") is True
    assert engine.core.state == "awake"  # the weights did not move
    assert engine.call("wake_up", ["weights", "scheduling"]) == ["kv_cache"]
    assert engine.call("wake_up", ["kv_cache"]) == []
    assert engine.call("is_sleeping") is False
    assert engine.call("is_paused") is (rests == ("pause",))
    assert told == [("sleep_worker", 0), ("wake_up_worker", ["kv_cache"])]
    engine.call("resume")
    engine.run()
    assert engine.is_right("a", "bb", "ccc")


def test_releasing_the_cache_of_a_busy_engine_is_refused(engine: Engine) -> None:
    with pytest.raises(Conflict, match="pause it first"):
        asyncio.run(sleep_client.release(asked_of(engine)))


def test_some_are_ended_by_id(engine: Engine) -> None:
    assert engine.call("requests") == ["a", "bb", "ccc"]
    engine.call("end", ["bb", "gone"])
    assert engine.finish == {"a": None, "bb": "abort", "ccc": None}
    engine.run()
    assert engine.is_right("a", "ccc")


def test_a_failed_sleep_blocks_no_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the caller got the error, and all requests waited forever."""

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
