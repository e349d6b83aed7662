"""FairQueue: the next request, the preempted one, and how long a light tenant waits beside a heavy one."""

from __future__ import annotations

import random

import pytest
from toy_device import ToyDevice

from quire.engine.core import EngineCore
from quire.features.fair_share.fair_queue import FairQueue
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.waiting_queue import WaitingQueue


class House:
    """A core on the toy device whose steps are counted."""

    def __init__(self, waiting: WaitingQueue, rows: int = 4, depth: int = 1):
        groups = [CacheGroup(CacheSpec(1, 1, 1, "int8"), (0,))]
        self.device = ToyDevice(groups, 401, 4, 0, random.Random(1))
        limits = SchedulerLimits(max_rows=rows, max_step_tokens=64, max_length=200, depth=depth)
        kv = KVManager(BlockPool(401), groups, 4)
        self.core = EngineCore(Scheduler(kv, limits, waiting=waiting), self.device, depth)
        self.first: dict[str, int] = {}  # the step of each request's first token
        self.tokens: dict[str, int] = {}
        self.steps = 0

    def ask(self, id: str, tenant: str, most: int, prompt: int = 8) -> None:
        tokens = [random.Random(id).randrange(97) for _ in range(prompt)]
        params = SamplingParams(max_tokens=most)
        self.device.kin[id] = (None, "")
        self.core.inbox.put(EngineRequest(id, tokens, params, tenant=tenant))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for output in self.core.receive(block=False) + self.core.step():
                self.first.setdefault(output.id, self.steps)
                self.tokens[output.id] = self.tokens.get(output.id, 0) + len(output.tokens)

    def of(self, tenant: str) -> int:
        return sum(count for id, count in self.tokens.items() if id.startswith(tenant))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_light_tenant_does_not_wait_for_a_flood_to_end(depth: int) -> None:
    waits = {}
    for name, queue in (("fair", FairQueue()), ("first come", WaitingQueue())):
        house = House(queue, depth=depth)
        for number in range(40):
            house.ask(f"flood{number}", "flood", 150)
        house.run(20)
        worst = 0
        for number in range(8):
            asked = house.steps
            house.ask(f"light{number}", "light", 3)
            for _ in range(500):
                if f"light{number}" in house.first:
                    break
                house.run(1)
            worst = max(worst, house.first.get(f"light{number}", 10_000) - asked)
        waits[name] = worst
    assert waits["fair"] <= 3 + depth
    assert waits["first come"] > 100


def test_weights_are_shares() -> None:
    house = House(FairQueue({"heavy": 3.0}))
    for number in range(60):
        house.ask(f"heavy{number}", "heavy", 30)
        house.ask(f"light{number}", "light", 30)
    house.run(200)
    assert house.of("heavy") / house.of("light") == pytest.approx(3.0, rel=0.15)


def test_a_single_tenant_uses_the_whole_capacity() -> None:
    house = House(FairQueue({"a": 0.01}))
    for number in range(8):
        house.ask(f"a{number}", "a", 30)
    house.run(70)
    assert house.of("a") == 240


def test_a_rest_is_not_saved_up() -> None:
    """A tenant that was idle while another worked does not get the whole engine when it returns."""
    house = House(FairQueue(), rows=2)
    for number in range(30):
        house.ask(f"a{number}", "a", 40)
    house.run(300)
    before = house.of("a")
    for number in range(30):
        house.ask(f"b{number}", "b", 40)
    house.run(200)
    assert house.of("b") == pytest.approx(house.of("a") - before, rel=0.2)


def test_equal_tenants_do_not_preempt_each_other() -> None:
    house = House(FairQueue(), rows=1)
    house.ask("a", "a", 50)
    house.ask("b", "b", 50)
    house.run(130)
    assert (house.of("a"), house.of("b")) == (50, 50)
    assert house.core.scheduler.count.preemptions == 0


def test_idle_tenants_are_forgotten_in_time() -> None:
    queue = FairQueue()
    house = House(queue)
    for number in range(1500):
        house.ask(f"t{number}", f"t{number}", 1)
        house.run(2)
    house.run(5)
    assert not queue.here
    assert len(queue.served) <= 1025
