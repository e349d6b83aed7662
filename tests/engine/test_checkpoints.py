"""Which checkpoints are kept, where steps are cut for them, and what a hook refuses to load."""

from __future__ import annotations

import msgspec
import pytest
from toy_device import ToyStates

from quire.features.state_checkpoints.gate import CheckpointGate
from quire.kvcache.checkpoints import CheckpointPool
from quire.protocol.plan import StepPlan, WorkItem
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.request import NO_ROW, Request
from quire.worker.state_hook import NAME, StateHook, StateMoves


def test_junctions_are_evicted_after_all_others() -> None:
    pool = CheckpointPool(3)
    slots = [
        pool.add(name, step, name == b"j").slot for step, name in enumerate([b"a", b"j", b"b"])
    ]
    assert sorted(slots) == [0, 1, 2]
    pool.use(b"a")
    assert pool.add(b"c", 3, False).slot == slots[2]  # b is the least recently used
    assert pool.add(b"d", 4, True).slot == slots[0]
    assert pool.add(b"e", 5, True).slot == slots[2]
    assert [name in pool for name in (b"a", b"b", b"c", b"d", b"e", b"j")] == [0, 0, 0, 1, 1, 1]
    assert pool.add(b"f", 6, False).slot == slots[1]  # the oldest junction
    pool.forget(b"d")
    assert pool.add(b"g", 7, False).slot == slots[0]
    with pytest.raises(KeyError):
        pool.use(b"d")


def a_request(length: int, hashes: int) -> Request:
    params = SamplingParams(max_tokens=4)
    made = Request.of(EngineRequest("r", [1] * length, params), 1, b"", False)
    made.hashes = [bytes([number]) for number in range(hashes)]
    return made


def cuts(gate: CheckpointGate, request: Request, start: int = 0, budget: int = 1000) -> list[int]:
    """Where the steps of a prompt end."""
    ends = []
    while start < len(request.tokens):
        start += gate.allow(request, start, min(budget, len(request.tokens) - start))
        ends.append(start)
    return ends


def test_a_step_ends_where_a_checkpoint_is_needed() -> None:
    request = a_request(45, 11)
    assert cuts(CheckpointGate(CheckpointPool(9), 4, 8), request) == [40, 45]
    assert cuts(CheckpointGate(CheckpointPool(9), 4, 8), a_request(40, 10)) == [32, 40]
    gate = CheckpointGate(CheckpointPool(9), 4, 8, interval=16)
    assert cuts(gate, request) == [16, 32, 40, 45]
    assert gate.usable(request, 7, 7) == 0
    assert cuts(gate, request) == [16, 24, 32, 40, 45]  # blocks of 28 tokens are cached
    gate.keeps_junctions = False
    gate.pool.add(bytes([3]), 1, False)  # the state after 16 tokens is known
    assert gate.usable(request, 7, 7) == 4
    assert cuts(gate, request, start=16, budget=9) == [25, 32, 40, 45]
    assert cuts(CheckpointGate(CheckpointPool(9), 4, 8), a_request(7, 1)) == [7]


def test_the_checkpoints_of_a_request_that_failed_are_forgotten() -> None:
    """Another request with the same tokens may have published its blocks, so it could find them."""
    for finish, late, kept in (
        ("error", False, 0), ("stop", False, 1), (None, False, 1), ("abort", False, 1), ("abort", True, 0),
    ):  # fmt: skip
        gate, request = CheckpointGate(CheckpointPool(9), 4, 8), a_request(13, 3)
        assert gate.allow(request, 0, 13) == 8
        request.row = 0
        gate.enter(request)
        request.num_computed_tokens = 8
        assert gate.data_for_hook(StepPlan(1, [], [WorkItem(0, 8)], [])) is not None
        assert len(gate.pool) == 1
        request.row, request.finish = NO_ROW, finish
        gate.leave(request)
        if late:  # its step was in flight
            gate.on_late_error(request)
        assert len(gate.pool) == kept


def test_the_checkpoints_of_a_preempted_request_that_fails_are_forgotten() -> None:
    gate, request = CheckpointGate(CheckpointPool(9), 4, 8), a_request(13, 3)
    gate.allow(request, 0, 13)
    request.row = 0
    gate.enter(request)
    request.num_computed_tokens = 8
    gate.data_for_hook(StepPlan(1, [], [WorkItem(0, 8)], []))
    request.row = NO_ROW
    gate.leave(request)
    assert len(gate.pool) == 1
    request.finish = "error"
    gate.on_waiting_ended(request)
    assert not len(gate.pool)


def test_a_step_that_needs_the_save_of_a_failed_step_fails() -> None:
    hook = StateHook(ToyStates())

    def plan(step: int, **moves) -> StepPlan:
        return StepPlan(step, [], [], [], {NAME: msgspec.msgpack.encode(StateMoves(**moves))})

    hook.before(plan(1, saves=[(0, 5)]), None)
    hook.after(plan(1))
    hook.before(plan(2, loads=[(1, 5, 1)]), None)
    hook.before(plan(3, saves=[(0, 5)]), None)  # and it fails
    with pytest.raises(RuntimeError, match="step 3, which failed"):
        hook.before(plan(4, loads=[(1, 5, 3)]), None)
    hook.after(plan(4))
    assert hook.states.saved_in == {5: 1}
