"""Scheduler: which requests run next, and how a step's result changes them.

Knows requests, budgets, gates and blocks. Does not know devices, text, or the name of any feature: a feature
that must influence the schedule is a Gate. Keep it so.

There is no prefill phase and no decode phase. A request has `length` tokens, of which `num_computed_tokens` are
computed; a step moves `num_computed_tokens` towards `length`. Chunked prefill, prefix cache hits, recomputation after
a preemption and draft tokens all use this one rule. It stays correct with late results because:

 1. a late result of a preempted request still adds its tokens: they are right;
 2. a request with pending tokens is not admitted again until they are known, so that no result from before
    a preemption is applied to the request's next row;
 3. a block is published only when its tokens are known and the step that writes it is certain to run,
    that is after the last point in a plan where a preemption may happen;
 4. a block that is allocated forgets its old content, and a block's hash includes the adapter and the salt;
 5. a prefix match leaves at least one token to compute;
 6. a request runs ahead only while the steps in flight cannot already reach its limit.

tests/engine/test_random_workloads.py catches the removal of each (tests/engine/mutations.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.errors import ValidationError
from quire.kvcache.manager import KVManager, Prefix
from quire.protocol.output import FINISHES, EngineOutput, ErrorKind, FinishReason
from quire.protocol.plan import EnteredRow, StepPlan, StepResult
from quire.protocol.request import EngineRequest
from quire.scheduler.counters import SchedulerCounters
from quire.scheduler.gate import Gate, any_wants_plan
from quire.scheduler.held_blocks import HeldBlocks, Load
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.output import output_of
from quire.scheduler.plan_builder import PendingOutputs, PlanBuilder
from quire.scheduler.preemption_warning import warn_of_preemption
from quire.scheduler.request import NO_ROW, Request
from quire.scheduler.waiting_queue import WaitingQueue

MAX_COUNTED_WAITING = 256
NO_TENSOR = "this engine generates tokens, and the request has no sampling parameters"


class Scheduler:
    """plan() builds the next step; commit() applies the result of a step."""

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        gates: Sequence[Gate] = (),
        clock: Callable[[], float] = time.time,
        waiting: WaitingQueue | None = None,
    ):
        self.kv, self.limits, self.gates, self.clock = kv, limits, list(gates), clock
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue() if waiting is None else waiting
        self.running: list[Request] = []
        self.free_rows = list(range(limits.max_rows - 1, -1, -1))
        self.freed_rows: list[int] = []  # rows freed since the last plan
        self.held_blocks = HeldBlocks(kv)
        self.in_flight: dict[int, list[PendingOutputs]] = {}  # by step
        self.steps = 0
        self.arrivals = 0
        self.count = SchedulerCounters()
        self.finished: dict[FinishReason, int] = dict.fromkeys(FINISHES, 0)

    # -- adding and aborting --------------------------------------------------------------------
    def add(self, received: EngineRequest) -> EngineOutput | None:
        """Queue a request, or return the error if it can never run (or not now)."""
        if received.id in self.requests:
            return self._refuse(received, f"request id {received.id!r} is already in use")
        if reason := self.limits.impossible(received, self.kv):
            return self._refuse(received, reason)
        if reason := self.limits.overloaded(received, self.waiting):
            return self._refuse(received, reason, "overloaded")
        self.arrivals += 1
        try:
            for gate in self.gates:
                received = gate.receive(received, self.arrivals)
        except ValidationError as error:
            return self._refuse(received, str(error))
        root = self.kv.hasher.root(received.salt, received.adapter)
        request = Request.of(received, self.arrivals, root, self.limits.by_priority)
        self.requests[request.id] = request
        self.waiting.add(request)
        return None

    def _refuse(
        self, received: EngineRequest, why: str, kind: ErrorKind = "invalid"
    ) -> EngineOutput:
        self.finished["error"] += not received.is_subrequest
        return EngineOutput(received.id, [], "error", None, why, kind, client=received.client)

    def abort(
        self, id: str, finish: FinishReason = "abort", error: str | None = None
    ) -> EngineOutput | None:
        """End a request that waits or runs. None if the scheduler does not have it (any more)."""
        if (request := self.requests.get(id)) is None:
            return None
        self._end(request, finish)
        return EngineOutput(id, [], finish, error=error, client=request.client)

    # -- plan -----------------------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        """Give every running request its next tokens, then admit waiting ones, within the budget."""
        builder = PlanBuilder(self.limits.max_step_tokens)
        self.held_blocks.retry()
        self._preempt_for_row()
        for gate in self.gates:
            gate.begin(self.running)
        for request in self._decoding_first():
            if request.row == NO_ROW:
                continue
            num_computed_tokens = request.num_computed_tokens
            num_tokens = self._num_new_tokens(request, builder.budget, num_computed_tokens)
            if not num_tokens:
                continue
            ahead = self.limits.num_ahead(request, num_tokens, len(self.running), self.kv)
            while (new_blocks := self.kv.grow(request, num_tokens, ahead)) is None:
                if (without_drafts := request.length - num_computed_tokens) < num_tokens:
                    num_tokens = without_drafts
                    continue
                if self.held_blocks.of_preempted():
                    break  # a preempted request's blocks will be free soon: wait for them
                if self.held_blocks.take_back_last(also_loading=True):
                    continue
                victim = self.waiting.victim_for_blocks(self.running)
                self._preempt_for_blocks(victim, builder)
                if victim is request:
                    break
            else:
                builder.add_work(request, num_tokens, new_blocks, self.limits.drafts)
                self.waiting.on_scheduled(request, num_tokens)
        for request, _ in builder.pending_outputs:  # only now is this work certain to run
            self.kv.publish(request)
        if not builder.preempted:
            self._admit(builder)
        if not (builder.work or self.held_blocks or any_wants_plan(self.gates)):
            return None
        plan = builder.finish(self.steps + 1, self.freed_rows)
        for gate in self.gates:
            if (extra := gate.data_for_hook(plan)) is not None:
                plan.extras[gate.name] = extra
        if not (plan.work or plan.extras):
            return None
        self.steps, self.freed_rows = plan.step, []
        self.in_flight[plan.step] = builder.pending_outputs
        return plan

    def _decoding_first(self) -> list[Request]:
        """Requests in decode first, then those with prompt tokens to compute, each in order of admission."""
        max_decode_tokens = 1 + self.limits.drafts
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            length = len(request.tokens) + request.num_pending_tokens
            is_decoding = length - request.num_computed_tokens <= max_decode_tokens
            (decoding if is_decoding else prefilling).append(request)
        return decoding + prefilling if prefilling else decoding

    def _num_new_tokens(self, request: Request, budget: int, num_computed_tokens: int) -> int:
        """How many tokens this request gets in this step, if num_computed_tokens of its tokens are computed."""
        length = len(request.tokens) + request.num_pending_tokens
        if request.num_pending_tokens and (length >= request.limit or not self.limits.run_ahead):
            return 0  # the steps in flight may already end it
        num_new_tokens = length - num_computed_tokens
        if num_new_tokens > budget and not self.limits.chunked:
            return 0
        if request.num_drafts:
            num_new_tokens += max(min(request.num_drafts, request.limit - length - 1), 0)
        num_new_tokens = min(num_new_tokens, self.limits.max_chunk or budget, budget)
        for gate in self.gates:
            if num_new_tokens:
                num_new_tokens = gate.allow(request, num_computed_tokens, num_new_tokens)
        return num_new_tokens

    @property
    def deferred(self) -> int:
        """How many of the first MAX_COUNTED_WAITING waiting requests a gate blocks. Changes nothing."""
        first = itertools.islice(self.waiting, MAX_COUNTED_WAITING)
        held_blocks, gates = self.held_blocks, self.gates
        return sum(r in held_blocks or any(gate.is_blocking(r) for gate in gates) for r in first)

    def _waiting_and_ready(self) -> Iterator[Request]:
        for request in self.waiting:
            if self.held_blocks and request in self.held_blocks:
                continue
            # all() would take twice as long, for each waiting request, in every step
            for gate in self.gates:
                if not gate.ready(request):
                    break  # skipped: it does not block later requests
            else:
                yield request

    def _admit(self, builder: PlanBuilder) -> None:
        """Give waiting requests blocks, then rows, while budget lasts. It preempts none and keeps the order."""
        admitted: list[Request] = []
        for request in self._waiting_and_ready():
            rows_left = len(self.free_rows) - len(admitted)
            if not (builder.budget and rows_left) or request.num_pending_tokens:
                break
            if not (num_tokens := self._give_blocks(request, builder.budget)):
                break
            if request in self.held_blocks:
                continue  # it gets a row when its blocks are filled
            request.row = self.free_rows[rows_left - 1]
            self._enter(request, num_tokens, builder)
            admitted.append(request)
        for request in admitted:
            self.free_rows.pop()
            self.waiting.remove(request)
            self.running.append(request)

    def _give_blocks(self, request: Request, budget: int) -> int:
        """Give a waiting request blocks, unless it owns some. Returns how many tokens it gets in this step; 0: stop here."""
        if start := self.held_blocks.start(request):
            return self._num_new_tokens(request, min(budget, request.capacity - start), start)
        start, prefix, (gate, num_loaded) = self._match(request)
        num_tokens = self._num_new_tokens(request, budget, start + num_loaded)
        if not num_tokens:
            return 0
        while not self.kv.admit(request, prefix, start, num_tokens, num_loaded):
            if not self.held_blocks.take_back_last(also_loading=False):
                return 0
        request.num_computed_tokens = start
        if gate is not None:
            self.held_blocks.load(request, gate, num_loaded)
        return num_tokens

    def _match(self, request: Request) -> tuple[int, Prefix, Load]:
        """(tokens, blocks by group) in the prefix cache, and what a gate can load after them."""
        if request.params.skip_reading_prefix_cache:
            return 0, [[] for _ in self.kv.groups], (None, 0)
        start, prefix = self.kv.match(request)
        return start, prefix, self.held_blocks.find_load(request, start, self.gates)

    def _enter(self, request: Request, num_tokens: int, builder: PlanBuilder) -> None:
        self.held_blocks.enter(request)
        num_cached_tokens = request.num_computed_tokens
        if not request.preemptions:
            if len(request.tokens) == request.num_prompt:  # else an engine that died told it
                request.num_cached_tokens = num_cached_tokens
            request.queued = max(self.clock() - request.arrived, 0.0)
            self.count.prefix_queries += request.num_prompt
            self.count.prefix_hits += num_cached_tokens
            self.count.prompt_tokens += request.num_prompt
        for gate in self.gates:
            gate.enter(request)
        builder.entered.append(
            EnteredRow(
                request.row, request.id, list(request.tokens), request.num_prompt, num_cached_tokens,
                [list(column) for column in request.blocks], request.params, request.adapter, request.extras,
                list(request.media), request.num_encoder_tokens, request.trial_length,
            )
        )  # fmt: skip
        builder.add_work(request, num_tokens, [], self.limits.drafts)
        self.waiting.on_scheduled(request, num_tokens)
        self.kv.publish(request)

    def _preempt_for_row(self) -> None:
        """If no row is free for the first waiting request, preempt a running one, if the queue names one."""
        first = None if self.free_rows else next(self._waiting_and_ready(), None)
        if first is None or first.num_pending_tokens:
            return
        if victim := self.waiting.victim_for_row(first, self.running):
            self._preempt(victim)

    def preempt_all(self) -> None:
        """Take the row and the blocks of every request. No step may be in flight."""
        for request in sorted(self.running, key=lambda r: r.order, reverse=True):
            self._preempt(request)
        self.held_blocks.revoke()

    def _preempt(self, request: Request) -> None:
        """Take a request's row and blocks and queue it again; its tokens are computed again later."""
        self._leave(request)
        request.num_computed_tokens = request.num_drafts = 0
        request.preemptions += 1
        self.waiting.add(request)
        self.count.preemptions += 1

    def _preempt_for_blocks(self, request: Request, builder: PlanBuilder) -> None:
        """Preempt a request because blocks are lacking, and undo this plan's work for it."""
        builder.preempted = True
        builder.remove_work(request)
        self._preempt(request)
        saves = any(gate.saves_preempted for gate in self.gates)
        warn_of_preemption(request, saves, self.count.preemptions)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.freed_rows.append(request.row)
        request.row = NO_ROW
        for gate in self.gates:
            gate.leave(request)
        self.held_blocks.leave(request, self.gates, self.in_flight)

    def _end(self, request: Request, finish: FinishReason) -> None:
        request.finish = finish
        self.finished[finish] += not request.is_subrequest
        del self.requests[request.id]
        if request.row != NO_ROW:
            self._leave(request)
        else:
            self.waiting.remove(request)
            for gate in self.gates:
                gate.on_waiting_ended(request)
            self.held_blocks.take_back(request)
        self.waiting.on_finished(request)

    # -- commit ---------------------------------------------------------------------------------
    def commit(self, result: StepResult) -> list[EngineOutput]:
        """Apply the result of a step. Its requests may have ended or been preempted in the meantime."""
        outputs: list[EngineOutput] = []
        pending_outputs = self.in_flight.pop(result.step)
        pairs = zip(pending_outputs, result.tokens, strict=True)
        for index, ((request, num_pending), tokens) in enumerate(pairs):
            request.num_pending_tokens -= num_pending
            error = result.errors.get(index) if result.errors else None
            if request.finish is not None:
                if error is not None:
                    self.held_blocks.retract_left(result.step, [request], set())
                    self._report_late_errors([request])
                continue
            if error is not None:
                outputs.append(self._fail(request, error, result.kinds.get(index, "internal")))
                continue
            if num_pending and not request.generates:
                if index not in result.tensors:
                    outputs.append(self._fail(request, NO_TENSOR))
                    continue
                self._end(request, "stop")
            elif num_pending:
                if request.row != NO_ROW:
                    # rejected draft tokens do not count as computed
                    request.num_computed_tokens -= num_pending - len(tokens)
                tokens = self._extend(request, tokens)
            if request.finish is None and (added := result.added_tokens.get(index)):
                tokens = tokens + self._extend(request, added)
            if tokens or request.finish is not None or index in result.prompt_logprobs:
                outputs.append(output_of(request, tokens, index, result))
            if request.row != NO_ROW:
                self.kv.publish(request)
        for gate in self.gates:
            if (extra := result.extras.get(gate.name)) is not None:
                gate.data_from_hook(extra)
            gate.add_output_details(outputs)
        return outputs

    def _extend(self, request: Request, tokens: list[int]) -> list[int]:
        """Add tokens up to the first that ends the request, and return those that were added."""
        known = request.tokens
        for count, token in enumerate(tokens, 1):
            known.append(token)
            if token in request.stops and len(known) > request.min_length:
                self._end(request, "stop")
            elif len(known) >= request.limit:
                self._end(request, "length")
            else:
                continue
            tokens = tokens[:count]
            break
        self.count.generation_tokens += len(tokens)
        return tokens

    def _fail(self, request: Request, error: str, kind: ErrorKind = "internal") -> EngineOutput:
        wrong_blocks, step = self.kv.retract(request), self.steps - len(self.in_flight)
        self.held_blocks.retract_left(step, [request], wrong_blocks)
        self._end(request, "error")
        return EngineOutput(request.id, [], "error", None, error, kind, client=request.client)

    def fail_step(self, step: int, error: str) -> list[EngineOutput]:
        """A step failed: its requests end with `error`, and so do the running requests that share its KV."""
        used = {request: self.kv.used_by(request) for request in self.running}
        wrong_blocks = set[int]().union(*(gate.failed(step) for gate in self.gates))
        requests = dict(self.in_flight.pop(step))
        failed = [request for request in requests if request.finish is None]
        for request, num_pending in requests.items():
            request.num_pending_tokens -= num_pending
            wrong_blocks |= self.kv.retract(request)
        wrong_blocks = self.held_blocks.retract_left(step, requests, wrong_blocks)
        self._report_late_errors(request for request in requests if request.finish is not None)
        failed += [r for r, blocks in used.items() if wrong_blocks & blocks and r not in failed]
        return [self._fail(request, error) for request in failed]

    def _report_late_errors(self, ended: Iterable[Request]) -> None:
        for request in ended:
            for gate in self.gates:
                gate.on_late_error(request)

    # -- state ----------------------------------------------------------------------------------
    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether a request is left, blocks that a gate holds back, or data of a gate."""
        return bool(self.requests or self.held_blocks or any_wants_plan(self.gates))

    def check(self) -> None:
        """Raises RuntimeError if no request is left and a row is not free, or a block that no gate holds back."""
        self.kv.pool.check()
        if self.requests or self.in_flight:
            return
        if len(self.free_rows) != self.limits.max_rows or self.running or len(self.waiting):
            raise RuntimeError(f"{self.limits.max_rows - len(self.free_rows)} rows leaked")
        used = self.kv.pool.usable - len(self.kv.pool.free)
        if leaked := used - self.held_blocks.num_blocks:
            raise RuntimeError(f"{leaked} blocks leaked")
