"""DataParallelClient: several engines with the same model, as one EngineClient.

    submit ---> EngineBalancer ---> ProcessClient 0, 1, ...     one thread for each receives its outputs
    outputs <------------------------------'

Knows which engine has which request. Does not know processes or sockets (`process_client.py`), or what a request is for.
The engines' loops know nothing of one another, also where their layers share experts (features/data_parallel_experts). If
an engine dies, its requests go on in the others, after the tokens that they have (`resume`). If an engine is idle
while requests wait in another, some of these are taken back and sent to the idle one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from quire.config.engine import Resolved
from quire.engine.data_parallel_calls import ONCE, merge, merged_ready, merged_stats
from quire.engine.engine_state import Condition, EngineState
from quire.engine.load_balancer import EngineBalancer, EngineLoad, Move
from quire.engine.process_client import ProcessClient
from quire.errors import (
    EngineDeadError,
    EngineDelayed,
    QuireError,
    StartupError,
    ValidationError,
)
from quire.logging import get_logger
from quire.protocol.output import EngineOutput, EngineReady, EngineStats, ErrorKind, FinishReason
from quire.protocol.request import EngineRequest

log = get_logger(__name__)

BATCHES = 64
"""Batches of outputs that are kept for the caller; more stay in the sockets."""
LOOK_AGAIN_S = 1.0  # how often a wait for outputs checks whether an engine lives
ENDED: tuple[Condition, ...] = ("dead", "closed")
WORST: tuple[Condition, ...] = ("ready", "restarting", "starting", "delayed", *ENDED)
"""States of an engine, from the best to the worst."""


class DataParallelClient:
    """An EngineClient over the clients of at least two engines.

    Args:
        clients: in the order of the engines' ranks.
        fronts: how many frontends share the engines.
    """

    ready: EngineReady

    def __init__(self, clients: Sequence[ProcessClient], fronts: int = 1):
        self.clients = list(clients)
        self.resolved: Resolved = self.clients[0].resolved
        self._balancer = EngineBalancer(len(self.clients), fronts)
        self._placing = threading.Lock()
        self._requests: list[dict[str, bool]] = [{} for _ in self.clients]
        """For each engine its unfinished requests, and whether they were aborted."""
        self._batches: queue.Queue[list[EngineOutput]] = queue.Queue(BATCHES)
        self._uneven = threading.Event()
        self._dead: EngineDeadError | None = None
        self._was_ready = False
        for number, client in enumerate(self.clients):
            client.give_back = partial(self._place_again, number)
            client.on_report = self._compare
            self._start_thread(self._read, number)
        self._start_thread(self._move_requests)

    def _start_thread(self, run: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=run, args=args, name="engines", daemon=True).start()

    # -- state ----------------------------------------------------------------------------------
    @property
    def engines(self) -> Sequence[ProcessClient]:
        return self.clients

    @property
    def epoch(self) -> int:
        """It grows by one with every replacement of an engine."""
        return sum(client.epoch for client in self.clients)

    def state(self) -> EngineState:
        """That of the engine in the worst state. An engine that ended is "delayed" as long as others serve."""
        states = [client.state() for client in self.clients]
        worst = max(
            states, key=lambda state: (WORST.index(state.condition), -state.startup.progress)
        )
        serves = self._was_ready and any(state.condition not in ENDED for state in states)
        if serves and worst.condition in ENDED:
            return msgspec.structs.replace(worst, condition="delayed")
        return worst

    def check(self) -> None:
        self._check_open()
        self._allowed()

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            states = [client.state() for client in self.clients]
            for number, state in enumerate(states):
                if state.condition in ENDED:
                    self.close()
                    raise StartupError(
                        f"engine {number} of {len(states)}: {state.error or 'the engine was shut down'}",
                        state.traceback,
                    )
            if all(state.condition == "ready" and state.ready is not None for state in states):
                self.ready = merged_ready([client.wait_ready(1.0) for client in self.clients])
                self._was_ready = True
                return self.ready
            time.sleep(0.01)
        self.close()
        raise StartupError(f"the engines were not ready after {timeout:.0f} s")

    def stats(self, fresh: bool = False) -> EngineStats:
        return merged_stats([client.stats(fresh) for client in self._living()])

    def _living(self) -> list[ProcessClient]:
        """Those that run, or will again. Raises EngineDeadError: there is none."""
        self._check_open()
        states = [client.state() for client in self.clients]
        living = [
            client
            for client, state in zip(self.clients, states, strict=True)
            if state.condition not in ENDED
        ]
        if not living:
            raise EngineDeadError(states[0].error or "the engine was shut down")
        return living

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    # -- requests -------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        self._check_open()
        for client in self.clients:
            client.refuse_poison(request)
        with self._placing:
            self._place(request)

    def _place(self, request: EngineRequest) -> None:
        """Send it to an engine. The caller has the lock `_placing`."""
        for others in range(len(self.clients), -1, -1):
            number = self._choose(request)
            client = self.clients[number]
            try:
                client.submit(request)
            except (EngineDeadError, EngineDelayed):
                if request.engine is not None or not others:
                    raise
                continue  # it has ended since it was chosen: choose again
            self._balancer.sent(number, client.stats())
            self._requests[number][request.id] = False
            return

    def _choose(self, request: EngineRequest) -> int:
        """Raises as `_allowed`."""
        for number, requests in enumerate(self._requests):
            if request.id in requests:
                return number  # that engine refuses an id that is in use
        if (rank := request.engine) is not None:
            return self.resolved.config.parallel.ranks.index(rank)  # the front end has checked it
        return self._balancer.choose(self._loads(), self._allowed())

    def _allowed(self) -> list[int]:
        """Engines that serve requests; else those that will soon. Raises EngineDeadError, EngineDelayed: none will."""
        conditions = [client.state().condition for client in self.clients]
        for group in (("ready",), ("restarting", "starting")):
            if numbers := [n for n, condition in enumerate(conditions) if condition in group]:
                return numbers
        least = min(range(len(conditions)), key=lambda number: WORST.index(conditions[number]))
        self.clients[least].check()
        return [least]  # it has become ready since

    def _loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(client.stats(), len(own))
            for client, own in zip(self.clients, self._requests, strict=True)
        ]

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        self._check_open()
        with self._placing:
            for client, requests in zip(self.clients, self._requests, strict=True):
                if here := [id for id in ids if id in requests]:
                    for id in here:
                        requests[id] = True
                    with suppress(EngineDeadError):
                        client.abort(here, why)

    def call(self, name: str, *args: Any) -> Any:
        clients = self._living()
        if name in ONCE:
            return self.clients[self._allowed()[0]].call(name, *args)
        calls, answers, errors = [], [], list[QuireError]()
        for client in clients:  # all work at the same time
            try:
                calls.append((client, client.ask(name, *args)))
            except QuireError as error:
                errors.append(error)
        for client, one in calls:
            try:
                answers.append(client.answer_to(one))
            except QuireError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return merge(name, answers)

    def outputs(self) -> list[EngineOutput]:
        while True:
            self._check_open()
            try:
                received = self._batches.get(timeout=LOOK_AGAIN_S)
            except queue.Empty:
                self._living()
                continue
            while not self._batches.empty():
                received = received + self._batches.get()
            if received:  # `close` puts an empty list, which only wakes this thread
                return received

    def close(self) -> None:
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        for client in self.clients:
            if client.supervisor is not None:
                client.supervisor.stop()
        for client in self.clients:
            client.close()
        self._uneven.set()
        self._put([])

    # -- the threads ----------------------------------------------------------------------------
    def _read(self, number: int) -> None:
        """Receive the outputs of one engine until no process of it will come."""
        client = self.clients[number]
        while self._dead is None:
            try:
                outputs = client.outputs()
            except EngineDeadError as error:
                if self._dead is None:
                    log.error("engine %d has stopped: %s", number, error)
                break
            self._take(number, outputs)

    def _take(self, number: int, outputs: list[EngineOutput]) -> None:
        """The outputs of an engine."""
        with self._placing:
            for output in outputs:
                output.engine = number
                if output.finish is not None:
                    self._requests[number].pop(output.id, None)
        self._put(outputs)

    def _put(self, outputs: list[EngineOutput]) -> None:
        while True:
            try:
                self._batches.put(outputs, timeout=0.5)
                return
            except queue.Full:
                if self._dead is not None:
                    return  # the caller takes no more outputs

    def _place_again(
        self, number: int, outputs: list[EngineOutput], requests: Sequence[EngineRequest]
    ) -> None:
        """An engine died: its last outputs come before the outputs of the engines that get its requests."""
        if outputs:
            self._take(number, outputs)
        ended: list[EngineOutput] = []
        for request in requests:
            with self._placing:
                ended += self._placed_again(request)
        if ended:
            self._put(ended)

    def _placed_again(self, request: EngineRequest) -> Iterator[EngineOutput]:
        """Place a request once more; yields its end if that is not possible or not wanted."""
        before = [own.pop(request.id) for own in self._requests if request.id in own]
        if any(before):
            yield EngineOutput(request.id, [], "abort", client=request.client)
            return
        try:
            self._place(request)
        except QuireError as error:
            kind: ErrorKind = "invalid" if isinstance(error, ValidationError) else "overloaded"
            yield EngineOutput(
                request.id, [], "error", error=str(error), error_kind=kind, client=request.client
            )

    # -- idle engines beside full ones ------------------------------------------------------------
    def _compare(self) -> None:
        """An engine has reported: wake the thread that moves requests, if there is anything to move."""
        with self._placing:
            if self._next_move() is not None:
                self._uneven.set()

    def _next_move(self) -> Move | None:
        ready = [n for n, client in enumerate(self.clients) if client.state().condition == "ready"]
        return self._balancer.move(self._loads(), ready) if len(ready) > 1 else None

    def _move_requests(self) -> None:
        while True:
            self._uneven.wait()
            self._uneven.clear()
            if self._dead is not None:
                return
            try:
                self._move()
            except QuireError as error:
                log.debug("requests stay in their engine: %s", error)
            except Exception:
                log.exception("requests could not be moved between engines")

    def _move(self) -> None:
        """Take waiting requests back from one engine, and send them to another."""
        with self._placing:
            if (move := self._next_move()) is None:
                return
            source = self.clients[move.source]
            self._balancer.moved(move, self._loads())
        ids: list[str] = source.call("withdraw", source.unstarted(), move.count)
        ended: list[EngineOutput] = []
        for id in ids:
            with self._placing:
                if id in self._requests[move.source] and (request := source.forget(id)) is not None:
                    ended += self._placed_again(request)
        if ended:
            self._put(ended)
