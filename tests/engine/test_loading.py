"""A waiting request that owns blocks loses them when the request that computed their content fails."""

from __future__ import annotations

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.plan import StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.gate import Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler


class SlowGate(Gate):
    """Has one block of the request `b`, and never gets it."""

    def can_load(self, request, start):
        return 4 if request.id == "b" else 0

    def loaded(self, request):
        return None


def test_a_load_that_shares_wrong_blocks_is_taken_back() -> None:
    kv = KVManager(BlockPool(20), [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))], 4)
    limits = SchedulerLimits(max_rows=2, max_step_tokens=40, max_length=60, depth=2)
    scheduler = Scheduler(kv, limits, [SlowGate()])
    params = SamplingParams(max_tokens=5)
    scheduler.add(EngineRequest("a", list(range(6)), params))
    first = scheduler.plan()
    assert first is not None
    scheduler.add(EngineRequest("b", list(range(15)), params))
    scheduler.plan()
    waiting = scheduler.requests["b"]
    shared = waiting.blocks[0][0]
    assert shared == first.entered[0].blocks[0][0]
    assert waiting.num_computed_tokens == 8
    assert waiting in scheduler.held_blocks
    scheduler.commit(StepResult(1, [[]], errors={0: "wrong"}))
    assert waiting not in scheduler.held_blocks
    assert (waiting.blocks, waiting.num_computed_tokens) == ([[]], 0)
    assert not kv.pool.hash_of
    scheduler.abort("b")
    assert len(kv.pool.free) == kv.pool.usable
