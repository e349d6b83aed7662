"""The plans of a pipeline, with a fake clock: how long its stages wait, and that each request gets its tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from quire.features.pipeline.gate import PipelineGate
from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.output import EngineOutput
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

WEIGHTS, TOKEN = 1.0, 1 / 64
"""Time that a stage takes for a plan, and for each of its tokens."""


@dataclass
class FakePipeline:
    """A scheduler over stages that take a known time. Without a gate every plan takes all rows that it can."""

    stages: int
    gated: bool = True
    num_blocks: int = 1000
    now: float = 0.0
    busy: float = 0.0
    plans: list[list[int]] = field(default_factory=list)  # tokens by work item

    def __post_init__(self) -> None:
        gates = [PipelineGate(self.stages)] if self.gated else []
        kv = KVManager(
            BlockPool(self.num_blocks), [CacheGroup(CacheSpec(1, 8, 8, "float32"), (0,))], 16,
            caching=False, hasher=Hasher(16),
        )  # fmt: skip
        limits = SchedulerLimits(
            max_rows=64, max_step_tokens=2048, max_length=4096, depth=self.stages, run_ahead=False
        )
        self.scheduler = Scheduler(kv, limits, gates)
        self.free = [0.0] * self.stages
        self.tokens: dict[str, int] = {}

    def add(self, id: str, prompt: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        assert self.scheduler.add(EngineRequest(id, list(range(prompt)), params)) is None

    def run(self) -> float:
        """Serve all requests. Returns the share of the time in which stages waited."""
        flight: deque[tuple[float, StepPlan]] = deque()
        while self.scheduler.has_requests:
            if len(flight) < self.stages and (plan := self.scheduler.plan()) is not None:
                flight.append((self._finished(plan), plan))
                if len(flight) < self.stages:
                    continue
            done, plan = flight.popleft()
            self.now = max(self.now, done)
            tokens = [[7] if item.samples else [] for item in plan.work]
            for output in self.scheduler.commit(StepResult(plan.step, tokens)):
                self._count(output)
        self.scheduler.check()
        return 1 - self.busy / (self.stages * self.now)

    def _finished(self, plan: StepPlan) -> float:
        self.plans.append([item.num_tokens for item in plan.work])
        cost, at = WEIGHTS + TOKEN * sum(self.plans[-1]), self.now
        for stage in range(self.stages):
            at = self.free[stage] = max(at, self.free[stage]) + cost
            self.busy += cost
        return at

    def _count(self, output: EngineOutput) -> None:
        assert output.error is None
        self.tokens[output.id] = self.tokens.get(output.id, 0) + len(output.tokens)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_rows_that_decode_are_split_over_the_stages(stages: int) -> None:
    waits = []
    for gated in (True, False):
        pipeline = FakePipeline(stages, gated)
        for number in range(12):
            pipeline.add(str(number), 20, 60 + number)
        waits.append(pipeline.run())
        assert pipeline.tokens == {str(number): 60 + number for number in range(12)}
    assert waits[0] < 0.2
    assert waits[1] > 0.9 * (1 - 1 / stages)  # one plan has all rows: one stage computes at a time


def test_a_plan_takes_its_share_of_the_rows_as_requests_end() -> None:
    pipeline = FakePipeline(3)
    for number in range(9):
        pipeline.add(str(number), 5, 10 + 10 * number)
    pipeline.run()
    assert all(len(plan) <= 9 for plan in pipeline.plans)
    decoding = [len(plan) for plan in pipeline.plans if set(plan) == {1}]
    assert max(decoding) == 3
    assert decoding[-1] == 1


def test_one_request_alone_decodes_without_a_wait_of_the_host() -> None:
    pipeline = FakePipeline(2)
    pipeline.add("a", 5, 30)
    assert pipeline.run() == pytest.approx(0.5)


def test_a_prompt_is_split_so_that_all_stages_compute() -> None:
    times = []
    for gated in (True, False):
        pipeline = FakePipeline(2, gated)
        pipeline.add("a", 1024, 1)
        pipeline.run()
        times.append(pipeline.now)
    assert times == [3 * (WEIGHTS + 512 * TOKEN), 2 * (WEIGHTS + 1024 * TOKEN)]
    short = FakePipeline(2)
    short.add("a", 100, 1)
    short.run()
    assert short.plans == [[100]]  # its parts would take as long as all of it


def test_long_prompts_and_decoding_rows_share_the_plans() -> None:
    pipeline = FakePipeline(2)
    for number in range(8):
        pipeline.add(str(number), 900, 40)
    waits = pipeline.run()
    assert waits < 0.25
    assert max(map(sum, pipeline.plans)) <= 2048


def test_preempted_requests_are_served_to_the_end() -> None:
    pipeline = FakePipeline(3, num_blocks=40)
    for number in range(8):
        pipeline.add(str(number), 40, 100)
    pipeline.run()
    assert pipeline.scheduler.count.preemptions > 0
    assert pipeline.tokens == {str(number): 100 for number in range(8)}
