"""ProcessClient: an EngineClient for an engine in another process, over ZMQ. The process may die and be replaced.

Knows sockets, the engine's state, and which of its requests are unfinished. Does not know how the engine is kept alive
(`supervisor.py`), or what a request is for. To never hang, it gives every wait a limit, and after each wait it checks
the engine's state. When the engine is replaced, its requests go on in the next process after the tokens that they have
(`unfinished_request.py`); without `resume`, those that had begun end with an error. A request that ran at two deaths of the
engine is refused.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from quire.config.engine import Resolved
from quire.engine.client import answer, encoded
from quire.engine.engine_sockets import EngineSockets
from quire.engine.engine_state import EngineState, StateBoard
from quire.engine.poison_requests import MAX_DIGESTS, POISON, Suspects, digest_of
from quire.engine.supervisor import EngineSupervisor
from quire.engine.unfinished_request import UnfinishedRequest
from quire.errors import EngineDeadError, EngineDelayed, QuireError, StartupError, ValidationError
from quire.logging import get_logger
from quire.protocol.output import (
    EngineOutput,
    EngineReady,
    EngineStats,
    ErrorKind,
    FinishReason,
    FromEngine,
    Reply,
)
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine
from quire.protocol.tensor_data import FrameDecoder

if TYPE_CHECKING:
    from quire.engine.remote_engines import RemoteEngine

LOOK_AGAIN_MS = 200  # how often a wait checks the engine's state

log = get_logger(__name__)


class AskedCall(NamedTuple):
    """A call whose answer is not known yet."""

    number: int
    epoch: int
    name: str


class ProcessClient:
    """An EngineClient, whose engine may die and be replaced.

    Args:
        board: the engine's state.
        supervisor: the engine's supervisor, if this client must close it.
        client: this client's number among the frontends.
        suspects: which requests ran when engines died; several clients of one frontend share it.

    Attributes:
        on_report: called when the engine sent statistics.
        give_back: takes the last outputs of an engine that died, and the requests that another may have; None: its next
            process gets them.
        batch_invariant: requests that go on have the bits of an undisturbed run.
    """

    ready: EngineReady

    def __init__(
        self,
        resolved: Resolved,
        folder: Path,
        board: StateBoard,
        supervisor: EngineSupervisor | RemoteEngine | None = None,
        client: int = 0,
        suspects: Suspects | None = None,
    ):
        self.resolved, self.client, self.supervisor = resolved, client, supervisor
        self.on_report: Callable[[], None] = lambda: None
        self.give_back: Callable[[list[EngineOutput], list[EngineRequest]], None] | None = None
        self.batch_invariant = False
        self._folder, self._board = folder, board
        self._suspects = Suspects() if suspects is None else suspects
        self._poison, self._cleared = frozenset[str](), set[str]()
        self._context: zmq.Context[Any] = zmq.Context()
        self._decoder = FrameDecoder[list[FromEngine]](list[FromEngine])
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._unfinished: dict[str, UnfinishedRequest] = {}
        self._outputs: list[EngineOutput] = []
        self._replies: dict[int, Reply] = {}
        self._replied = threading.Condition()
        # Start at the time, so that replies to an earlier process with this client number match no call of this one.
        self._numbers = itertools.count(time.monotonic_ns())
        self._dead: EngineDeadError | None = None
        self._stats = EngineStats()  # the latest that the engine sent
        self.epoch = self.state().epoch
        self._sockets = EngineSockets(self._context, folder / str(self.epoch), client)

    @property
    def engines(self) -> Sequence[ProcessClient]:
        return [self]

    def state(self) -> EngineState:
        return self._board.read() if self.supervisor is None else self.supervisor.state

    def check(self) -> None:
        self._check_open()
        state = self.state()
        if state.condition in ("dead", "closed"):
            raise EngineDeadError(state.error or "the engine was shut down")
        if state.condition == "delayed":
            raise EngineDelayed(state.incident)

    def stats(self, fresh: bool = False) -> EngineStats:
        if fresh:
            self._stats = EngineStats(**self.call("stats"))
        return self._stats

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            state = self.state()
            if state.condition == "ready" and state.ready is not None:
                self.ready, self.batch_invariant = state.ready, state.ready.batch_invariant
                return state.ready
            if state.condition in ("dead", "closed"):
                self.close()
                raise StartupError(state.error or "the engine was shut down", state.traceback)
            time.sleep(0.01)
        self.close()
        raise StartupError(f"the engine was not ready after {timeout:.0f} s")

    # -- interface for the frontend -------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        self.check()
        if request.client != self.client:
            request = msgspec.structs.replace(request, client=self.client)
        self.refuse_poison(request)
        data = encoded(request)  # a request that cannot be encoded is not registered
        with self._sending:
            # The engine refuses an id that is in use; this client keeps the first request.
            is_new = request.id not in self._unfinished
            if is_new:
                self._unfinished[request.id] = UnfinishedRequest(request)
            try:
                self._send(data)
            except EngineDeadError:
                if is_new:
                    del self._unfinished[request.id]
                raise

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        self._check_open()
        with self._sending:
            for id in ids:
                if (unfinished := self._unfinished.get(id)) is not None:
                    unfinished.aborted = True
            self._put(Abort(ids, why))

    def call(self, name: str, *args: Any) -> Any:
        return self.answer_to(self.ask(name, *args))

    def ask(self, name: str, *args: Any) -> AskedCall:
        """Send a call, for `answer_to`. Raises EngineDeadError, EngineDelayed."""
        number = next(self._numbers)
        self.check()
        with self._sending:
            self._put(Call(number, name, list(args), self.client))
            return AskedCall(number, self.epoch, name)

    def answer_to(self, call: AskedCall) -> Any:
        """Wait for the answer. Raises as `call`."""
        number, epoch, name = call
        while True:
            if self._reading.acquire(blocking=False):  # no other thread receives messages
                try:
                    self._receive(10)
                finally:
                    self._reading.release()
            with self._replied:
                if (reply := self._replies.pop(number, None)) is not None:
                    return answer(reply)
                self.check()
                if self.epoch != epoch:
                    raise QuireError(f"the engine was restarted before {name!r} finished")
                self._replied.wait(0.01)

    def outputs(self) -> list[EngineOutput]:
        with self._reading:
            while not self._outputs:
                self._check_open()
                self._receive(LOOK_AGAIN_MS)
            outputs, self._outputs = self._outputs, []
            return outputs

    def unstarted(self) -> list[str]:
        """Ids of requests without outputs so far that any engine may serve, the oldest first."""
        all_of_them = list(self._unfinished.items())
        return [id for id, one in all_of_them if not one.has_started and one.request.engine is None]

    def forget(self, id: str) -> EngineRequest | None:
        """Remove a request that the engine gave back (`withdraw`); None: it has ended."""
        with self._sending:
            unfinished = self._unfinished.pop(id, None)
        return None if unfinished is None else unfinished.request

    def close(self, seconds: float = 5.0) -> None:
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        if self.supervisor is not None:
            self.supervisor.close(seconds)
        with self._sending, self._reading:
            self._context.destroy(linger=0)

    # -- messages -------------------------------------------------------------------------------
    def _put(self, message: ToEngine) -> None:
        self._send(encoded(message))

    def _send(self, data: bytes) -> None:
        try:
            self._sockets.down.send(data)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine was shut down") from error

    def _receive(self, wait_ms: int) -> None:
        """Receive messages; if none comes, check the engine's state. The caller has the lock `_reading`."""
        try:
            if self._sockets.up.poll(wait_ms):
                frames = self._sockets.up.recv_multipart()
                try:
                    messages = self._decoder.decode(frames)
                except (msgspec.MsgspecError, IndexError) as why:
                    self._end_unreadable(why)
                else:
                    self._handle(messages)
                return
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine was shut down") from error
        state = self.state()
        if state.epoch != self.epoch:
            self._follow_replacement(state)
        elif state.condition == "delayed":
            self._end_all(state)
        elif state.condition in ("dead", "closed") and self._dead is None:
            if self.give_back is not None:
                self._end_all(state)
            self._dead = EngineDeadError(state.error or "the engine was shut down")

    def _handle(self, messages: list[FromEngine]) -> None:
        for message in messages:
            match message:
                case EngineOutput():
                    if (unfinished := self._unfinished.get(message.id)) is not None:
                        if unfinished.add(message):
                            self._clear(unfinished.request)
                        resumed = unfinished.request.num_prompt > 0
                        message.resumed = resumed and not self.batch_invariant
                        if message.finish is not None:
                            del self._unfinished[message.id]
                            if message.finish not in ("abort", "error"):
                                self._clear(unfinished.request)
                    self._outputs.append(message)
                case Reply():
                    with self._replied:
                        self._replies[message.id] = message
                        self._replied.notify_all()
                case EngineStats():
                    self._stats = message
                    self.on_report()

    def _end_unreadable(self, why: Exception) -> None:
        """The engine, or a node that passes its messages on, sent something else: nobody knows which requests it ended, so
        all of this engine's end."""
        log.error("engine messages could not be decoded, so its requests end: %s", why)
        with self._sending:
            ids = list(self._unfinished)
            for id in ids:
                self._end(id, "error", "an output of the engine could not be decoded")
            if ids:
                self._put(Abort(ids))

    def _follow_replacement(self, state: EngineState) -> None:
        """The engine was replaced: send its requests to the new process, and end those that cannot go on."""
        while self._sockets.up.poll(0):  # outputs from before the death are valid
            self._handle(self._decoder.decode(self._sockets.up.recv_multipart()))
        error = (
            "the engine was restarted while this request ran; see the server's log under"
            f" {state.incident}"
        )
        if state.epoch > self.epoch + 1:
            # two deaths since the last look: the second has overwritten what was known of the first
            state = msgspec.structs.replace(state, recorded=False)
        with self._sending:
            self._sockets.close()
            self.epoch = state.epoch
            self._sockets = EngineSockets(
                self._context, self._folder / str(self.epoch), self.client
            )
            # Its gauges are the dead process's; the next one reports when it has work.
            self._stats = msgspec.structs.replace(
                self._stats, running=0, waiting=0, deferred=0, kv_usage=0.0
            )
            again = self._after_death(state, error, "reported")
            for unfinished in again if self.give_back is None else ():
                unfinished.sent += 1
                self._resend(unfinished.request)
        self._return(again)

    def _note_deaths(self, state: EngineState) -> None:
        """Count the death for the requests that it is blamed on."""
        mine = self._unfinished
        for id, length in state.lost.items():
            if id in mine and 0 < mine[id].request.trial_length <= length:
                self._clear(mine[id].request)  # it passed its trial, and the output was lost
        if state.recorded:
            suspects = [mine[id] for id in state.blamed if id in mine]
        else:  # any of them may have run
            suspects = [one for one in mine.values() if one.is_on_trial] or list(mine.values())
        self._suspects.ran(digest_of(one.request) for one in suspects)
        self._poison = frozenset(self._suspects.poison())

    @property
    def _resumes(self) -> bool:
        """Whether requests that have run go on in another process."""
        mode = self.resolved.config.scheduler.resume
        return mode == "always" or (mode == "exact" and self.batch_invariant)

    def _ran(self, unfinished: UnfinishedRequest, state: EngineState) -> bool:
        """Whether it ran in the process that died, or may have."""
        if unfinished.has_started or unfinished.request.id in state.lost:
            return True
        return not state.recorded if self._resumes else unfinished.sent > 1

    def _end_all(self, state: EngineState) -> None:
        """No engine will run for a while, so end all requests instead of letting them wait."""
        error = f"the engine failed and will be restarted later (see the server's log under {state.incident})"
        with self._sending:
            again = self._after_death(state, error, "overloaded")
            for unfinished in again if self.give_back is None else ():
                self._end(unfinished.request.id, "error", error, "overloaded")
        self._return(again)

    def _after_death(
        self, state: EngineState, error: str, kind: ErrorKind
    ) -> list[UnfinishedRequest]:
        """End the requests that were aborted, or cannot go on. Returns the others, as another process must get them."""
        self._note_deaths(state)
        again = []
        for id, unfinished in list(self._unfinished.items()):
            ran = self._ran(unfinished, state)
            if unfinished.aborted:  # the old process may not have received the abort
                self._end(id, "abort")
            elif self._is_poison(unfinished.request):
                self._end(id, "error", POISON if self._resumes else error, kind)
            elif ran and not (self._resumes and unfinished.may_go_on):
                self._end(id, "error", error, kind)
            else:
                if ran:
                    is_blamed = not state.recorded or id in state.blamed
                    unfinished.go_on(state.lost.get(id, 0), is_blamed)
                again.append(unfinished)
                if self.give_back is not None:
                    del self._unfinished[id]
        return again

    def _return(self, again: Sequence[UnfinishedRequest]) -> None:
        """Let other engines have these requests. Without `_sending`: they are sent by other clients."""
        if self.give_back is not None and again:
            outputs, self._outputs = self._outputs, []
            self.give_back(outputs, [unfinished.request for unfinished in again])

    def _end(
        self, id: str, finish: FinishReason, error: str | None = None, kind: ErrorKind = "internal"
    ) -> None:
        """End a request here, without the engine."""
        del self._unfinished[id]
        self._outputs.append(
            EngineOutput(id, [], finish, error=error, error_kind=kind, client=self.client)
        )

    def _clear(self, request: EngineRequest) -> None:
        """A request that finished normally, or passed its trial, is no longer suspected."""
        if self._suspects and self._suspects.completed(digest := digest_of(request)):
            if len(self._cleared) >= MAX_DIGESTS:
                self._cleared.clear()
            self._cleared.add(digest)

    def refuse_poison(self, request: EngineRequest) -> None:
        """Raises ValidationError: the request ran at two deaths of the engine."""
        if self._is_poison(request):
            raise ValidationError(POISON)

    def _is_poison(self, request: EngineRequest) -> bool:
        known = self.state().poison
        if not known and not self._poison:
            return False
        digest = digest_of(request)
        return digest in self._poison or (digest in known and digest not in self._cleared)

    def _resend(self, request: EngineRequest) -> None:
        """If this fails, only the request ends, not the thread that reads outputs."""
        try:
            self._put(request)
        except ValidationError as why:
            self._end(request.id, "error", str(why), "invalid")

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
