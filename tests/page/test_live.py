"""The facts that an engine records while the page has a viewer; without a viewer it records nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from toy_device import ToyDevice

from quire.engine.core import EngineCore
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.observe import inspector
from quire.observe.inspector import CACHED, FREE, OWNED, SHARED, Inspector
from quire.observe.process_memory import process_tree, resident_bytes
from quire.protocol.request import Abort, EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler


class Clock:
    """A second passes with every turn of the core."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(
    num_blocks: int = 40, depth: int = 1, max_rows: int = 2, drafts: int = 0
) -> tuple[EngineCore, Inspector, Clock]:
    clock = Clock()
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    device = ToyDevice(groups, num_blocks + 1, 4, drafts, random.Random(1))
    kv = KVManager(BlockPool(num_blocks + 1), groups, 4)
    limits = SchedulerLimits(
        max_rows=max_rows, max_step_tokens=8, max_length=100, depth=depth, drafts=drafts
    )
    core = EngineCore(Scheduler(kv, limits, clock=clock), device, depth)
    live = Inspector(core.scheduler, core.observers, core.stats, depth, 64)
    return core, live, clock


def ask(core: EngineCore, id: str, prompt: list[int], most: int = 5) -> None:
    kin(core, id)
    core.inbox.put(
        EngineRequest(id, prompt, SamplingParams(max_tokens=most), arrived=core.scheduler.clock())
    )


def kin(core: EngineCore, id: str) -> None:
    core.executor.kin[id] = (None, "")


def turn(core: EngineCore, clock: Clock, times: int = 1) -> None:
    for _ in range(times):
        clock.now += 1
        core.receive(block=False)
        core.step()


def cells(seen: dict) -> list[int]:
    runs = seen["blocks"]["runs"]
    return [what for what, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def life(seen: dict, id: str) -> dict:
    return next(one for one in seen["lives"] if one["id"] == id)


def kinds(seen: dict, id: str) -> list[tuple[str, int]]:
    return [(kind, tokens) for kind, _, tokens in life(seen, id)["phases"]]


def test_each_block_is_reported_once_with_its_owner():
    core, watch, clock = make()
    for id in "abc":
        ask(core, id, list(range(9)))
    turn(core, clock, 4)
    seen = watch.look()
    found, pool = cells(seen), core.scheduler.kv.pool
    assert len(found) == seen["blocks"]["count"] == 40
    owners = {OWNED + r.number: r for r in core.scheduler.running}
    assert len(owners) == 2
    for block, what in enumerate(found, 1):
        if what in owners:
            assert pool.refs[block] == 1
            assert block in owners[what].blocks[0]
        else:
            free = CACHED if block in pool.hash_of else FREE
            assert what == (SHARED if pool.refs[block] > 1 else free)
    assert SHARED in found  # b found what a had computed
    told = {what: found.count(what) for what in (FREE, CACHED, SHARED)}
    assert told == dict(zip((FREE, CACHED, SHARED), (seen["blocks"][k] for k in ("free", "cached", "shared")), strict=True))  # fmt: skip


def test_a_life_from_queue_to_end():
    core, watch, clock = make(max_rows=1)
    watch.look()
    ask(core, "a", list(range(20)), most=3)  # chunks of 8, 8, 4, and then two steps of one token
    ask(core, "b", list(range(50, 53)), most=2)
    turn(core, clock, 2)
    seen = watch.look()
    assert kinds(seen, "a") == [("queued", 0), ("prefill", 8), ("prefill", 8)]
    assert kinds(seen, "b") == [("queued", 0)]
    turn(core, clock, 8)
    seen = watch.look()
    assert kinds(seen, "a") == [("queued", 0), ("prefill", 8), ("prefill", 8), ("prefill", 4), ("decode", 2)]  # fmt: skip
    assert kinds(seen, "b") == [("queued", 0), ("prefill", 3), ("decode", 1)]
    assert life(seen, "a")["state"] == "ended"
    assert life(seen, "a")["finish"] == "length"
    starts = [ago for _, ago, _ in life(seen, "b")["phases"]]
    assert starts == sorted(starts, reverse=True)
    assert [step["step"] for step in seen["steps"]] == list(range(1, 8))
    assert seen["steps"][0]["work"] == [[1, 8, True, 0]]
    assert seen["steps"][3]["work"] == [[1, 1, False, 0]]
    assert all(step["ms"] >= 0 for step in seen["steps"])
    assert sum(tokens for step in seen["steps"] for _, tokens, *_ in step["work"]) == 20 + 2 + 3 + 1
    msgspec.msgpack.encode(seen)


def test_preemptions_are_shown():
    core, watch, clock = make(num_blocks=8)
    watch.look()
    for at, id in enumerate("ab"):
        ask(core, id, [at + 7 * number for number in range(8)], most=20)
    for _ in range(12):
        turn(core, clock)
        watch.look()
    assert core.scheduler.count.preemptions > 0
    seen = watch.look()
    assert ("preempted", 0) in kinds(seen, "b")
    while life(seen, "b")["state"] != "ended":
        turn(core, clock)
        seen = watch.look()
    found = [kind for kind, _ in kinds(seen, "b")]
    after = found[found.index("preempted") :]
    assert after[:2] == ["preempted", "prefill"]  # what it had is computed again
    assert after[-1] == "decode"


def test_running_requests_are_visible_to_a_new_viewer():
    core, watch, clock = make()
    ask(core, "a", list(range(5)), most=10)
    turn(core, clock, 3)
    assert kinds(watch.look(), "a") == [("queued", 0), ("unseen", 0)]
    assert life(watch.look(), "a")["state"] == "decode"
    turn(core, clock)
    assert kinds(watch.look(), "a") == [("queued", 0), ("unseen", 0), ("decode", 1)]


@pytest.mark.parametrize("depth", [1, 2])
def test_without_viewers_nothing_is_recorded(depth: int):
    core, watch, clock = make(depth=depth)
    ask(core, "a", list(range(5)), most=30)
    turn(core, clock, 3)
    assert watch not in core.observers  # never looked at
    watch.look()
    assert watch in core.observers
    turn(core, clock, 2)
    assert watch.steps
    assert watch.lives
    turn(core, clock, int(inspector.FORGET_S) + 2)
    assert watch not in core.observers
    assert not watch.steps
    assert not watch.lives
    watch.look()  # and it can be looked at again
    turn(core, clock)
    assert len(watch.look()["steps"]) >= 1
    while core.scheduler.has_requests:
        turn(core, clock)
    core.scheduler.check()


def test_tokens_are_sent_for_one_selected_request():
    core, watch, clock = make()
    ask(core, "a", [11, 12, 13], most=4)
    turn(core, clock, 2)
    assert watch.words(1) is None  # without a viewer nothing is kept
    seen = watch.look()
    assert b"tokens" not in msgspec.json.encode([seen["lives"], seen["steps"]])
    request = core.scheduler.requests["a"]
    words = watch.words(1)
    assert words is not None
    assert words["prompt"] == [11, 12, 13]
    assert words["output"] == request.tokens[3:]
    assert words["tenant"] == ""
    assert watch.words(99) is None


def test_messages_are_bounded():
    core, watch, clock = make(num_blocks=30_000, max_rows=200)
    watch.look()
    for number in range(300):
        ask(core, f"r{number}", [number % 97, number // 97, 5], most=90)
    for _ in range(100):
        turn(core, clock)
        watch.looked = clock.now
    seen = watch.look()
    assert len(seen["lives"]) <= inspector.MOST_LIVES
    assert len(seen["steps"]) <= inspector.STEPS
    assert all(len(step["work"]) <= inspector.MOST_IN_STEP for step in seen["steps"])
    assert len(cells(seen)) == 10_000
    assert seen["blocks"]["each"] == 3
    assert len(msgspec.json.encode(seen)) < 400_000


def test_many_equal_blocks_are_a_few_numbers():
    _, watch, _ = make(num_blocks=10_000)
    assert watch.look()["blocks"]["runs"] == [FREE, 10_000]
    assert len(msgspec.json.encode(watch.look())) < 2_000


def test_aborted_and_old_requests_are_shown_and_removed():
    core, watch, clock = make(max_rows=1)
    watch.look()
    ask(core, "a", [1, 2], most=90)
    ask(core, "b", [3, 4], most=90)
    turn(core, clock, 2)
    watch.look()
    core.inbox.put(Abort(["a", "b"]))
    turn(core, clock)
    seen = watch.look()
    assert [(life(seen, id)["state"], life(seen, id)["finish"]) for id in "ab"] == [
        ("ended", "abort")
    ] * 2
    clock.now += inspector.SPAN_S + 1
    assert watch.look()["lives"] == []


def test_phases_follow_each_other():
    core, watch, clock = make(num_blocks=10)
    watch.look()
    for at, id in enumerate("abc"):
        ask(core, id, [at + 3 * number for number in range(9)], most=15)
    for _ in range(40):
        turn(core, clock)
        for one in watch.look()["lives"]:
            agos = [ago for _, ago, _ in one["phases"]]
            assert all(a >= b for a, b in pairwise(agos))
            assert one["ended"] <= agos[-1]


def test_memory_is_that_of_the_process():
    import os

    assert process_tree(os.getpid())[0] == os.getpid()
    assert resident_bytes([os.getpid()]) > 1 << 20
    assert resident_bytes([0x7FFFFFFF]) == 0


def test_refused_draft_tokens_are_shown():
    core, watch, clock = make(drafts=3)
    watch.look()
    ask(core, "a", list(range(5)), most=40)
    for _ in range(60):
        turn(core, clock)
        seen = watch.look()
        if life(seen, "a")["ended"] >= 0:
            break
    one = life(seen, "a")
    work = [item for step in seen["steps"] for item in step["work"]]
    assert one["output"] == 40 == 1 + sum(tokens - refused for _, tokens, prompt, refused in work if not prompt)  # fmt: skip
    assert one["drafted"] - one["accepted"] == sum(refused for *_, refused in work) > 0
    assert one["accepted"] > 0
