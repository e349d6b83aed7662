"""EngineCore: the loop. Receive, plan, launch, commit, publish.

Knows a scheduler, an executor, an inbox, and how far the host may run ahead of the device. Does not know
what a request is for, or which features are on. Keep it so.

    depth 1    plan 1, run 1, commit 1, plan 2, ...
    depth 2    host   plan 1 | plan 2   | commit 1, plan 3 | commit 2, plan 4 | ...
               device        | step 1   | step 2           | step 3           | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from quire.engine.listener import EngineListener
from quire.errors import InternalError, QuireError, ValidationError
from quire.logging import get_logger
from quire.observe.buckets import FAMILIES
from quire.observe.step_observer import StepObservers
from quire.protocol.bucket_counts import BucketCounts
from quire.protocol.output import EngineOutput, EngineStats, Reply
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.executor.base import Executor, StepFuture

log = get_logger(__name__)

LOOK_AGAIN_S = 0.2  # the longest wait for a message while the scheduler has requests

PENDING: Final = object()
"""What a function returns whose answer is not known yet. It is called again, with the same arguments, in each turn."""

Answered = EngineOutput | Reply
Outbox = list[Answered]
Inbox = SimpleQueue[ToEngine | Answered | None]  # None only wakes the loop


class EngineCore:
    """One loop with a depth. depth 1 is synchronous, 2 overlaps host and device, n fills n stages."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, depth: int, check_when_idle: bool = True,
        token_bounds: Sequence[float] = FAMILIES["iteration_tokens"],
    ):  # fmt: skip
        self.scheduler, self.executor, self.depth = scheduler, executor, depth
        self.step_tokens = BucketCounts(token_bounds)
        self.check_when_idle = check_when_idle
        # QUIRE_CHECK=1: check after each step, to find the one that breaks something
        self.check_each_step = False
        self.inbox: Inbox = SimpleQueue()
        self.in_flight: deque[tuple[int, StepFuture]] = deque()
        self.functions: dict[str, Callable[..., Any]] = {}  # what Call may name (engine/rpc.py)
        self.pending_calls: list[Call] = []  # their functions returned PENDING
        self.current_call = Call(0, "")  # of the running function
        self.outbox: Outbox = []  # messages that a function sends besides its reply
        self.observers = StepObservers()
        self.listeners: list[EngineListener] = []  # they hear what happens to the engine
        self.counts: dict[str, float] = {}  # additional counters of observers
        self.histograms: dict[str, BucketCounts] = {}  # of features
        self.labels: dict[str, Callable[[], str]] = {}  # texts for labels of metrics
        # by file name: restores a feature's state from a file of an earlier process, and writes it there from now on
        self.state_files: dict[str, Callable[[Path], None]] = {}
        self.state = "awake"
        self.idle = True
        self.broken: BaseException | None = None  # why the engine cannot run further steps

    # -- the loop -------------------------------------------------------------------------------
    def turn(self) -> Outbox:
        """Receive messages, run one step; wait for a message when there is nothing to do."""
        outputs = self.receive(block=self.idle)
        outputs += self.step()
        return outputs

    def receive(self, block: bool) -> Outbox:
        """Handle every message that is there; with `block`, wait until there is one.

        With work in the scheduler, the wait has a limit. A gate that blocks requests or holds blocks back should wake the
        loop later. If one forgets that, the requests are delayed for a moment, not for ever.
        """
        outputs: Outbox = []
        calls, self.pending_calls = self.pending_calls, []
        for call in calls:
            outputs += self._answer(call)
        try:
            end = LOOK_AGAIN_S if self.scheduler.has_work else None
            message = self.inbox.get(block=block and not outputs, timeout=end)
            self.idle = False  # another thread may run the step
            while True:
                self._handle(message, outputs)
                message = self.inbox.get_nowait()
        except Empty:
            return outputs

    def step(self) -> Outbox:
        """Launch a step if one can be planned and the depth allows it; commit the oldest if enough are in flight."""
        if self.broken is not None:
            raise self.broken
        self.idle = False
        if len(self.in_flight) < self.depth and (plan := self.scheduler.plan()) is not None:
            self.observers.launched(plan)
            self.in_flight.append((plan.step, self.executor.launch(plan)))
            if len(self.in_flight) < self.depth:
                return []
        if not self.in_flight:
            self._go_idle()
            return []
        return self._commit()

    def close(self) -> None:
        """End the engine and its workers. May be called twice."""
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            try:
                listener.on_close()
            except Exception:
                log.exception("%s failed at the end of the engine", type(listener).__name__)
        self.executor.close()

    def settle(self) -> None:
        """Commit all steps in flight and launch none: for a function that needs an idle device.

        A failure ends the engine, as it does in `step`; otherwise only the function's caller would know of it.
        """
        try:
            while self.in_flight:
                self.outbox += self._commit()
        except Exception as error:
            self.broken = error
            raise

    def _commit(self) -> Outbox:
        step, pending = self.in_flight.popleft()
        try:
            result = pending.result()
        except BaseException as error:
            self.observers.finished(step, error)
            if not isinstance(error, self.executor.recoverable):
                raise
            log.exception("step %d failed; its requests end with an error", step)
            return list(self.scheduler.fail_step(step, f"the step failed: {type(error).__name__}"))
        self.observers.finished(step, result)
        outputs: Outbox = list(self.scheduler.commit(result))
        # A step's tokens: those that it made, and the prompts that entered since the step before it.
        self.step_tokens.add_growth(self.scheduler.count.tokens)
        if self.check_each_step:
            self.scheduler.check()
        return outputs

    def _go_idle(self) -> None:
        self.idle = True
        if self.check_when_idle and not self.scheduler.has_requests:
            self.scheduler.check()

    # -- messages -------------------------------------------------------------------------------
    def _handle(self, message: ToEngine | Answered | None, outputs: Outbox) -> None:
        match message:
            # a complete answer, for a message that could not be decoded
            case EngineOutput() | Reply():
                outputs.append(message)
            case EngineRequest():
                if (error_output := self.scheduler.add(message)) is not None:
                    outputs.append(error_output)
            case Abort(ids=ids, why=why):
                ended = (self.scheduler.abort(id, why) for id in ids)
                outputs += [output for output in ended if output is not None]
            case Call():
                outputs += self._answer(message)

    def _answer(self, call: Call) -> Outbox:
        """Run a named function. Returns what it sends: outputs, then its reply unless that is pending."""
        reply = self._reply(call)
        messages, self.outbox = self.outbox, []
        if reply.value is PENDING:
            self.pending_calls.append(call)
            return messages
        return [*messages, reply]

    def _reply(self, call: Call) -> Reply:
        """If the function fails, the caller gets the error, and the engine goes on."""
        if (function := self.functions.get(call.name)) is None:
            known = ", ".join(sorted(self.functions))
            return Reply(
                call.id,
                error=f"the engine has no function {call.name!r}; it has {known}",
                client=call.client,
                error_kind="reported",
            )
        self.current_call = call
        try:
            return Reply(call.id, function(*call.args), client=call.client)
        except ValidationError as error:
            return Reply(call.id, error=str(error), client=call.client, error_kind="invalid")
        except Exception as error:
            log.exception("engine function %s failed", call.name)
            if isinstance(error, QuireError) and not isinstance(error, InternalError):
                return Reply(call.id, error=str(error), client=call.client, error_kind="reported")
            return Reply(call.id, error=f"{type(error).__name__}: {error}", client=call.client)

    def stats(self) -> EngineStats:
        scheduler, kv = self.scheduler, self.scheduler.kv
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=kv.usage,
            num_blocks=kv.pool.usable,
            block_size=kv.block_size,
            preemptions=scheduler.count.preemptions,
            prefix_queries=scheduler.count.prefix_queries,
            prefix_hits=scheduler.count.prefix_hits,
            prompt_tokens=scheduler.count.prompt_tokens,
            generation_tokens=scheduler.count.generation_tokens,
            finished={str(why): number for why, number in scheduler.finished.items()},
            steps=scheduler.steps,
            deferred=scheduler.deferred,
            histograms=kv.pool.stats()
            | {"step_tokens": self.step_tokens.stats}
            | {name: one.stats for name, one in self.histograms.items()},
            state=self.state,
            counts=dict(self.counts),
            labels={name: read() for name, read in self.labels.items()},
        )
