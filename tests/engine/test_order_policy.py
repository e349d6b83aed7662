"""The order of requests is a joint: a test policy decides admission and both kinds of preemption."""

from __future__ import annotations

import random

import pytest
from toy_device import ToyDevice
from workload import reference

from quire.engine.core import EngineCore
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.waiting_queue import WaitingQueue


class ShortestFirst(WaitingQueue):
    """Shorter prompts first; a longer running one gives up its row or its blocks."""

    def __init__(self):
        super().__init__()
        self.served, self.finished, self.victims = {}, [], []

    def __iter__(self):
        return iter(sorted(super().__iter__(), key=self.rank))

    def rank(self, request):
        return request.num_prompt, request.number

    def on_scheduled(self, request, num_tokens):
        self.served[request.id] = self.served.get(request.id, 0) + num_tokens

    def on_finished(self, request):
        self.finished.append(request.id)

    def victim_for_blocks(self, running):
        self.victims.append(("blocks", max(running, key=self.rank).id))
        return max(running, key=self.rank)

    def victim_for_row(self, first, running):
        victim = max(running, key=self.rank)
        if self.rank(victim) < self.rank(first):
            return None
        self.victims.append(("row", victim.id))
        return victim


def run(lengths: list[int], rows: int, blocks: int, depth: int) -> tuple[ShortestFirst, EngineCore]:
    """Requests with these prompt lengths, one a turn, to their ends; every text must equal the reference."""
    groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
    device = ToyDevice(groups, blocks, 4, 0, random.Random(1))
    limits = SchedulerLimits(max_rows=rows, max_step_tokens=16, max_length=60, depth=depth)
    policy = ShortestFirst()
    scheduler = Scheduler(KVManager(BlockPool(blocks), groups, 4), limits, waiting=policy)
    core = EngineCore(scheduler, device, depth)
    requests, texts = [], {}
    for number, length in enumerate(lengths):
        requests.append(
            EngineRequest(f"r{number}", list(range(1, length + 1)), SamplingParams(max_tokens=12))
        )
        device.kin[f"r{number}"] = (None, "")
        core.inbox.put(requests[-1])
        for output in core.turn():
            texts.setdefault(output.id, []).extend(output.tokens)
    while core.scheduler.has_requests:
        for output in core.turn():
            texts.setdefault(output.id, []).extend(output.tokens)
    scheduler.check()
    assert texts == {request.id: reference(request)[0] for request in requests}
    return policy, core


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_policy_orders_and_preempts_for_a_row(depth: int) -> None:
    policy, core = run([20, 18, 3, 16, 2], rows=2, blocks=101, depth=depth)
    assert policy.finished[:2] == ["r2", "r4"]
    assert {kind for kind, _ in policy.victims} == {"row"}
    assert core.scheduler.count.preemptions == len(policy.victims)
    assert policy.served["r2"] == 3 + 12 - 1  # each token but the last, once


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_policy_preempts_for_blocks(depth: int) -> None:
    policy, _ = run([4, 20, 5, 19], rows=4, blocks=13, depth=depth)
    assert ("blocks", "r1") in policy.victims or ("blocks", "r3") in policy.victims
    assert sorted(policy.finished) == ["r0", "r1", "r2", "r3"]
    assert policy.finished.index("r0") < policy.finished.index("r1")
