"""Inspector: the live state of an engine for a viewer: its blocks, its steps, and each request's timeline.

Knows the scheduler, its block pool and the worker protocol. Reports tokens only of a single, named request. It costs
nothing while nothing looks: the first `look` adds it to the engine's observers of steps; when no call has come for
`FORGET_S`, the next step removes it.

    a timeline    queued | prefill 256 | prefill 40 | decode ........ | preempted .. | prefill | decode .. | ended
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from quire.kvcache.block_pool import NULL_BLOCK, BlockPool
from quire.observe.process_memory import process_tree, resident_bytes
from quire.observe.step_observer import StepObservers
from quire.platforms.detect import facts
from quire.protocol.output import EngineStats
from quire.protocol.plan import StepPlan, StepResult, WorkItem
from quire.scheduler.request import NO_ROW, Request
from quire.scheduler.scheduler import Scheduler

FORGET_S = 5.0
SPAN_S = 30.0  # requests that ended longer ago are not reported
STEPS = 96
MOST_IN_STEP = 64  # work items that are reported one by one
MOST_LIVES = 64
MOST_WAITING = 24
MOST_PHASES = 96
MOST_WORDS = 512  # tokens of a prompt, and of an output, that are reported
CELLS = 10_240  # with more blocks than this, a cell shows several

FREE, CACHED, SHARED, OWNED = 0, 1, 2, 3
"""The values of a cell. SHARED: a block of several requests; OWNED + n: a block of the n-th request to arrive."""

QUEUED, UNSEEN, PREFILL, DECODE, PREEMPTED = "queued", "unseen", "prefill", "decode", "preempted"


@dataclass(slots=True)
class TimelinePhase:
    """It lasts until the next phase begins."""

    kind: str
    since: float
    tokens: int = 0


@dataclass(slots=True)
class RequestTimeline:
    request: Request
    phases: list[TimelinePhase]
    ended: float | None = None
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0

    def add(self, kind: str, now: float, tokens: int = 0) -> None:
        """Add a phase. Decode steps form one phase, each chunk of a prompt has its own; old ones are dropped."""
        last = self.phases[-1]
        if kind == last.kind == DECODE:
            last.tokens += tokens
            return
        if len(self.phases) == MOST_PHASES:
            del self.phases[1]
        self.phases.append(TimelinePhase(kind, now, tokens))


@dataclass(slots=True)
class StepRecord:
    """One step. `work`: (arrival number of the request, tokens, whether they are of a prompt, refused draft tokens)."""

    number: int
    launched: float
    work: list[tuple[int, int, bool, int]]
    drafts: list[int]  # by work item
    rest: int = 0  # tokens of work items beyond MOST_IN_STEP
    seconds: float = -1.0


class Inspector:
    """A StepObserver from the first `look` until nothing has looked for `FORGET_S`.

    Args:
        observers: where it enters itself.
        stats: the engine's statistics.
        depth: how many steps may be in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observers: StepObservers,
        stats: Callable[[], EngineStats],
        depth: int,
        bytes_per_block: int = 0,
    ):
        self.scheduler, self.observers, self.stats = scheduler, observers, stats
        self.depth, self.bytes_per_block = depth, bytes_per_block
        self.clock = scheduler.clock
        self.looked = 0.0
        self.steps: deque[StepRecord] = deque(maxlen=STEPS)
        self.lives: dict[int, RequestTimeline] = {}  # by arrival number
        self.in_flight: dict[int, StepRecord] = {}
        self.resulted = 0.0  # when the last step ended
        self.machine = 0
        self.processes: list[int] = []

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions for `EngineClient.call`."""
        return {"live": self.look, "live_words": self.words}

    # -- reports --------------------------------------------------------------------------------
    def look(self) -> dict[str, Any]:
        """The whole state, as builtins; times are in ms before now."""
        began = time.perf_counter()
        now = self.clock()
        if self not in self.observers:
            self._start(now)
        self.looked = now
        scheduler = self.scheduler
        for request, _ in zip(scheduler.waiting, range(MOST_WAITING), strict=False):
            self._life(request, now)
        self._notice(now)
        seen = {
            "stats": dict(msgspec.structs.asdict(self.stats())),
            "blocks": block_map(scheduler.kv.pool, scheduler.running),
            "steps": [step_dict(step, now) for step in self.steps],
            "lives": [timeline_dict(life, now) for life in self.lives.values()],
            "limits": {
                "rows": scheduler.limits.max_rows,
                "step_tokens": scheduler.limits.max_step_tokens,
                "length": scheduler.limits.max_length,
                "depth": self.depth,
            },
            "memory": {
                "resident": resident_bytes(self.processes),
                "machine": self.machine,
                "block": self.bytes_per_block,
            },
        }
        return seen | {"cost_ms": 1000 * (time.perf_counter() - began)}

    def words(self, number: int) -> dict[str, Any] | None:
        """The first tokens of a request's prompt and the last ones of its output; None if it is unknown."""
        if (life := self.lives.get(number)) is None:
            return None
        request = life.request
        output = request.tokens[request.num_prompt :]
        return {
            "tenant": request.tenant,
            "prompt": request.tokens[: min(request.num_prompt, MOST_WORDS)],
            "prompt_left": max(0, request.num_prompt - MOST_WORDS),
            "output": output[-MOST_WORDS:],
            "output_left": max(0, len(output) - MOST_WORDS),
        }

    # -- observation ----------------------------------------------------------------------------
    def _start(self, now: float) -> None:
        self.machine = self.machine or facts().total_bytes
        self.processes = self.processes or process_tree(os.getpid())
        self.observers.add(self)
        for request in self.scheduler.running:
            if (life := self._life(request, now)) is not None:
                life.phases.append(
                    TimelinePhase(UNSEEN, min(request.arrived + request.queued, now))
                )

    def _stop(self) -> None:
        self.observers.remove(self)
        self.steps.clear()
        self.lives.clear()
        self.in_flight.clear()

    def _life(self, request: Request, now: float) -> RequestTimeline | None:
        """The timeline of a request, a new one if necessary; None if there are too many."""
        number = request.number
        if (life := self.lives.get(number)) is None and self._room():
            arrived = request.arrived if 0 < now - request.arrived < 86_400 else now
            life = self.lives[number] = RequestTimeline(request, [TimelinePhase(QUEUED, arrived)])
        return life

    def _room(self) -> bool:
        if len(self.lives) < MOST_LIVES:
            return True
        ended = next((n for n, life in self.lives.items() if life.ended is not None), None)
        if ended is None:
            return False
        del self.lives[ended]
        return True

    def launched(self, plan: StepPlan) -> None:
        now = self.clock()
        if now - self.looked > FORGET_S:
            self._stop()
            return
        self._notice(now)
        step = StepRecord(plan.step, now, [], [])
        counted = self.scheduler.in_flight[plan.step]
        for (request, _), item in zip(counted, plan.work, strict=True):
            is_prompt = of_prompt(request, item)
            if len(step.work) < MOST_IN_STEP:
                step.work.append((request.number, item.num_tokens, is_prompt, 0))
                step.drafts.append(item.drafts)
            else:
                step.rest += item.num_tokens
            if (life := self._life(request, now)) is not None:
                life.add(PREFILL if is_prompt else DECODE, now, item.num_tokens)
        self.steps.append(step)
        self.in_flight[plan.step] = step

    def finished(self, step: int, result: StepResult | BaseException) -> None:
        if (record := self.in_flight.pop(step, None)) is not None:
            self.resulted = self.clock()
            record.seconds = self.resulted - record.launched
            if isinstance(result, StepResult) and any(record.drafts):
                self._verified(record, result)

    def _verified(self, record: StepRecord, result: StepResult) -> None:
        """Note how many draft tokens each work item accepted."""
        pairs = zip(record.work, record.drafts, result.tokens, strict=False)
        for index, ((number, count, is_prompt, _), drafts, drawn) in enumerate(pairs):
            if not (drafts and drawn):
                continue
            accepted = min(len(drawn) - 1, drafts)
            record.work[index] = number, count, is_prompt, drafts - accepted
            if (life := self.lives.get(number)) is not None:
                life.drafted += drafts
                life.accepted += accepted

    def _notice(self, now: float) -> None:
        """Note which requests ended or were preempted since the last call; drop those that ended long ago."""
        missing = []
        for number, life in self.lives.items():
            last = life.phases[-1]
            if life.ended is not None:
                if now - life.ended > SPAN_S:
                    missing.append(number)
            elif life.request.finish is not None:
                ran = last.kind not in (QUEUED, PREEMPTED)
                life.ended = max(self.resulted, last.since) if ran else now
            elif life.request.row == NO_ROW and last.kind not in (QUEUED, PREEMPTED):
                life.add(PREEMPTED, now)
        for number in missing:
            del self.lives[number]


# -- as builtins ----------------------------------------------------------------------------------
def of_prompt(request: Request, item: WorkItem) -> bool:
    """Whether a work item computes tokens known before: a prompt, or all tokens again after a preemption."""
    before = request.num_computed_tokens - item.num_tokens
    return before < request.num_prompt or item.num_tokens - item.drafts > 1


def step_dict(step: StepRecord, now: float) -> dict[str, Any]:
    return {
        "step": step.number,
        "ago": ms(now - step.launched),
        "ms": ms(step.seconds) if step.seconds >= 0 else -1,
        "work": [list(item) for item in step.work],
        "rest": step.rest,
    }


def timeline_dict(life: RequestTimeline, now: float) -> dict[str, Any]:
    """A timeline as builtins. A phase is (kind, since, tokens)."""
    request = life.request
    state = life.phases[-1].kind
    if state == UNSEEN:
        state = PREFILL if request.num_computed_tokens < request.num_prompt else DECODE
    return {
        "n": request.number,
        "id": request.id,
        "tenant": request.tenant,
        "state": "ended" if life.ended is not None else state,
        "finish": request.finish,
        "prompt": request.num_prompt,
        "hit": request.num_cached_tokens,
        "loaded": request.loaded_tokens,
        "computed": min(request.num_computed_tokens, request.length),
        "output": len(request.tokens) - request.num_prompt,
        "limit": request.limit - request.num_prompt,
        "preemptions": request.preemptions,
        "drafted": life.drafted,
        "accepted": life.accepted,
        "blocks": sum(block != NULL_BLOCK for column in request.blocks for block in column),
        "phases": [[phase.kind, ms(now - phase.since), phase.tokens] for phase in life.phases],
        "ended": -1 if life.ended is None else ms(now - life.ended),
    }


def ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def block_map(pool: BlockPool, running: list[Request]) -> dict[str, Any]:
    """The state of each block, run-length encoded: [state, count, state, count, ...]."""
    cells = [FREE] * pool.num_blocks
    for block in pool.hash_of:
        cells[block] = CACHED
    for request in running:
        owner = OWNED + request.number
        for column in request.blocks:
            for block in column:
                if block != NULL_BLOCK:
                    cells[block] = owner if pool.refs[block] == 1 else SHARED
    cells = cells[1:]
    free, cached, shared = cells.count(FREE), cells.count(CACHED), cells.count(SHARED)
    each = max(1, -(-len(cells) // CELLS))
    if each > 1:  # a cell shows the most important state: used, then cached, then free
        cells = [max(cells[start : start + each]) for start in range(0, len(cells), each)]
    runs: list[int] = []
    for what, same in groupby(cells):
        runs += (what, sum(1 for _ in same))
    return {
        "count": pool.usable,
        "each": each,
        "runs": runs,
        "free": free,
        "cached": cached,
        "shared": shared,
    }
