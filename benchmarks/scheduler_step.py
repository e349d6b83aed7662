"""`python -m benchmarks steps`: host cost of the scheduler's plan and commit, by number of decoding requests.

Knows the scheduler and the KV cache manager. Does not know torch or a model: results have made-up tokens.
The design's goals: 256 rows under 1.0 ms, 1,024 under 4 ms, and linear in rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVManager
from quire.kvcache.specs import CacheGroup, CacheSpec
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

GOALS_MS = {256: 1.0, 1024: 4.0}
PROMPT = 64  # tokens, plus up to a block, so that some rows start a new block in every step


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds per step, all rows decoding."""

    rows: int
    depth: int
    plan: float  # median
    commit: float  # median
    total: float  # median of plan + commit
    worst: float  # 99th of 100
    goal: float | None

    def line(self) -> str:
        goal = "" if self.goal is None else f"   goal {self.goal} ms: {self.verdict}"
        return (
            f"{self.rows:>6} rows  depth {self.depth}   plan {self.plan:6.3f}  commit {self.commit:6.3f}"
            f"  sum {self.total:6.3f}  p99 {self.worst:6.3f} ms  {1e3 * self.total / self.rows:5.2f} us/row{goal}"
        )

    @property
    def verdict(self) -> str:
        return "met" if self.goal is None or self.total <= self.goal else "missed"


def make_scheduler(rows: int, steps: int, depth: int, block_size: int) -> Scheduler:
    """A scheduler with `rows` requests that decode for at least `steps` steps."""
    length = PROMPT + steps + 3 * block_size
    group = CacheGroup(CacheSpec(8, 128, 128, "bfloat16"), (0,))
    pool = BlockPool(1 + rows * -(-length // block_size))
    limits = SchedulerLimits(
        max_rows=rows, max_step_tokens=rows * (PROMPT + block_size), max_length=length, depth=depth
    )
    scheduler = Scheduler(KVManager(pool, [group], block_size), limits)
    for number in range(rows):
        prompt = [number, *range(PROMPT - 1 + number % block_size)]
        params = SamplingParams(max_tokens=steps + block_size, ignore_eos=True, seed=0)
        refused = scheduler.add(EngineRequest(f"request-{number}", prompt, params))
        if refused is not None:
            raise RuntimeError(refused.error)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    token = plan.step % 1000
    return StepResult(plan.step, [[token] if work.samples else [] for work in plan.work])


def measure(rows: int, *, steps: int = 200, depth: int = 1, block_size: int = 16) -> StepCost:
    """Run `steps` decode steps of `rows` requests with `depth` plans in flight.

    Raises:
        RuntimeError: a step did not contain all rows, so the figures would be meaningless.
    """
    scheduler = make_scheduler(rows, steps + depth, depth, block_size)
    in_flight: list[StepPlan] = []
    plans: list[float] = []
    commits: list[float] = []
    while len(commits) < steps + 1:
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        if plan is None or len(plan.work) != rows:
            raise RuntimeError(
                f"{0 if plan is None else len(plan.work)} of {rows} rows were planned"
            )
        in_flight.append(plan)
        if len(in_flight) < depth:
            continue
        result = result_of(in_flight.pop(0))
        began = time.perf_counter()
        scheduler.commit(result)
        commits.append(1e3 * (time.perf_counter() - began))
        plans.append(1e3 * (planned - start))
    plans, commits = plans[1:], commits[1:]  # the first step computed the prompts
    both = sorted(p + c for p, c in zip(plans, commits, strict=True))
    return StepCost(
        rows=rows,
        depth=depth,
        plan=statistics.median(plans),
        commit=statistics.median(commits),
        total=statistics.median(both),
        worst=both[int(0.99 * (len(both) - 1))],
        goal=GOALS_MS.get(rows),
    )


def measure_all(steps: int = 200) -> list[StepCost]:
    measure(64, steps=50)  # warm up
    return [measure(rows, steps=steps, depth=d) for d in (1, 2) for rows in (64, 256, 1024)]


def profile(rows: int, steps: int) -> str:
    """A profile of the step by function."""
    import cProfile
    import io
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(measure, rows, steps=steps)
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(18)
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="decode steps to measure")
    parser.add_argument(
        "--profile", type=int, metavar="ROWS", help="profile this many rows instead"
    )
    args = parser.parse_args(argv)
    if args.profile:
        print(profile(args.profile, args.steps))
        return 0
    for cost in measure_all(args.steps):
        print(cost.line())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
