"""What a request published before it lost its row is unpublished when a step that was in flight fails."""

from __future__ import annotations

import pytest

from quire.kvcache.block_pool import NULL_BLOCK, BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec, WindowSpec
from quire.protocol.plan import StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

PROMPT = list(range(10))  # two blocks of 4, and a part


def request(name: str, tokens: list[int], priority: int = 0) -> EngineRequest:
    return EngineRequest(name, tokens, SamplingParams(max_tokens=40), priority=priority)


def scheduler_with(num_blocks: int) -> Scheduler:
    kv = KVManager(BlockPool(num_blocks), [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))], 4)
    return Scheduler(kv, SchedulerLimits(max_rows=3, max_step_tokens=40, max_length=60, depth=2))


def scheduler_with_window(*others: list[int]) -> Scheduler:
    """Steps 1 to 3 compute 4 tokens of `a` each, and are in flight; its first block has left the window. Others came later."""
    kv = KVManager(BlockPool(30), [CacheGroup(WindowSpec(1, 1, 1, "int8", window=4), (0,))], 4)
    limits = SchedulerLimits(max_rows=3, max_step_tokens=12, max_chunk=4, max_length=60, depth=3)
    scheduler = Scheduler(kv, limits)
    scheduler.add(request("a", list(range(20))))
    assert scheduler.plan() is not None
    for number, tokens in enumerate(others):
        scheduler.add(request(f"other {number}", tokens))
    for _ in range(2):
        assert scheduler.plan() is not None
    assert scheduler.requests["a"].blocks[0][0] == NULL_BLOCK
    return scheduler


def in_flight_and_published() -> Scheduler:
    """Step 1 computes the prompt of `a`; its two blocks are published when step 2 is planned, which `b` shares."""
    scheduler = scheduler_with(20)
    scheduler.add(request("a", PROMPT))
    assert scheduler.plan() is not None
    scheduler.add(request("b", [*PROMPT, 50, 51, 52]))
    assert scheduler.plan() is not None
    assert scheduler.requests["b"].num_cached_tokens == 8
    return scheduler


@pytest.mark.parametrize("ended", [["a", "b"], ["b"]], ids=["preempted", "aborted"])
def test_a_failed_step_leaves_no_block_of_a_request_without_a_row(ended: list[str]) -> None:
    scheduler = in_flight_and_published()
    if "a" in ended:
        scheduler._preempt(scheduler.requests["a"])
    else:
        scheduler.abort("a")
    assert scheduler.kv.pool.hash_of  # until the step fails
    outputs = scheduler.fail_step(1, "wrong")
    assert sorted(output.id for output in outputs) == ended  # `b` shares what was never written
    assert not scheduler.kv.pool.hash_of
    assert len(scheduler.kv.pool.free) == scheduler.kv.pool.usable


@pytest.mark.parametrize("ended", ["preempted", "aborted"])
def test_a_failed_row_leaves_no_block_of_a_request_without_a_row(ended: str) -> None:
    scheduler = in_flight_and_published()
    wrong_blocks = set(scheduler.requests["a"].blocks[0])
    if ended == "preempted":
        scheduler._preempt(scheduler.requests["a"])
    else:
        scheduler.abort("a")
    scheduler.commit(StepResult(1, [[]], errors={0: "wrong"}))
    assert not wrong_blocks & scheduler.kv.pool.hash_of.keys()


def test_a_step_that_was_committed_leaves_all_blocks() -> None:
    scheduler = in_flight_and_published()
    scheduler.commit(StepResult(1, [[7]]))
    kept = scheduler.kv.published_by(scheduler.requests["a"])
    scheduler._preempt(scheduler.requests["a"])
    scheduler.commit(StepResult(2, [[7], [7]]))
    scheduler.add(request("c", [*PROMPT, 60]))
    assert scheduler.plan() is not None
    scheduler.fail_step(3, "wrong")
    assert kept
    assert kept.items() <= scheduler.kv.pool.hash_of.items()


def test_blocks_with_other_content_stay() -> None:
    scheduler = in_flight_and_published()
    victim = scheduler.requests["a"]
    first = victim.blocks[0][0]
    scheduler._preempt(victim)
    pool = scheduler.kv.pool
    pool.forget(first)
    pool.publish(0, first, b"other")
    scheduler.fail_step(1, "wrong")
    assert pool.hash_of[first] == (0, b"other")


@pytest.mark.parametrize("ended", ["preempted", "aborted", "runs"])
@pytest.mark.parametrize("fails", ["row", "step"])
def test_a_block_that_left_a_window_is_unpublished(ended: str, fails: str) -> None:
    scheduler = scheduler_with_window()
    assert scheduler.kv.pool.hash_of
    if ended == "preempted":
        scheduler._preempt(scheduler.requests["a"])
    elif ended == "aborted":
        scheduler.abort("a")
    if fails == "row":
        scheduler.commit(StepResult(1, [[]], errors={0: "wrong"}))
    else:
        scheduler.fail_step(1, "wrong")
    assert not scheduler.kv.pool.hash_of


def test_a_request_ends_that_shared_a_wrong_block_which_left_its_window() -> None:
    scheduler = scheduler_with_window([*range(4), *range(40, 56)], list(range(30, 50)))
    sharing = scheduler.requests["other 0"]
    assert (sharing.num_cached_tokens, sharing.blocks[0][0]) == (4, NULL_BLOCK)
    outputs = scheduler.fail_step(1, "wrong")
    assert [output.id for output in outputs] == ["a", "other 0"]
