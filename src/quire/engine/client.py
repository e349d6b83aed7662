"""EngineClient: the interface of an engine for a frontend: submit, abort, call, outputs.

Knows how a caller's thread reaches an EngineCore in the same process (`InlineClient`). `process_client.py` reaches one
in another process; both behave alike. Does not know what a request is for.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import msgspec

from quire.config.engine import Resolved
from quire.engine.core import EngineCore, Outbox
from quire.engine.engine_state import EngineState
from quire.errors import (
    EngineDeadError,
    InternalError,
    ProcessorFailed,
    QueueFull,
    QuireError,
    ValidationError,
)
from quire.logging import get_logger
from quire.protocol.output import (
    EngineOutput,
    EngineReady,
    EngineStats,
    ErrorKind,
    FinishReason,
    Reply,
)
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine

log = get_logger(__name__)

ERRORS: dict[ErrorKind, type[QuireError]] = {
    "invalid": ValidationError,
    "overloaded": QueueFull,
    "reported": QuireError,
    "processor": ProcessorFailed,
    "internal": InternalError,
}


class EngineClient(Protocol):
    """The interface for a frontend. All methods may be called from any thread."""

    resolved: Resolved
    ready: EngineReady
    """Valid once `wait_ready` has returned."""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The engines that share the requests: this one alone, or a client for each."""

    @property
    def epoch(self) -> int:
        """The number of the engine's process: 1, then more with each replacement; 0: it has no process of its own."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Wait until the model is loaded.

        Raises:
            StartupError: the engine could not start (with its own message), or not within `timeout` seconds.
        """

    def state(self) -> EngineState:
        """Whether the engine starts, serves, is being replaced or has ended. Does not wait for the engine."""

    def check(self) -> None:
        """Raises EngineDeadError; or EngineDelayed if the engine accepts no requests until its next start."""

    def stats(self, fresh: bool = False) -> EngineStats:
        """The latest statistics, without waiting. `fresh`: wait for the engine to count now.

        Raises:
            EngineDeadError, QuireError: `fresh`, and the engine does not answer.
        """

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Everything about it, also a refusal, comes through `outputs`."""

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        """End these requests. Each one that still runs gets an output with finish `why`, and is counted as that."""

    def call(self, name: str, *args: Any) -> Any:
        """Call a named function of the engine (`rpc.py`) and wait for the answer.

        Raises:
            QuireError: the function failed, or there is none with this name.
            ValidationError: the arguments are invalid, and the function changed nothing.
        """

    def outputs(self) -> list[EngineOutput]:
        """Wait for new outputs. Raises EngineDeadError when there will be no more."""

    def close(self) -> None:
        """Stop the engine; `outputs` in another thread then raises EngineDeadError."""


class InlineClient:
    """Runs the core's steps in the thread that calls `outputs`."""

    epoch = 0

    def __init__(
        self,
        core: EngineCore,
        resolved: Resolved,
        ready: EngineReady,
        shut: Callable[[], None] = lambda: None,
    ):
        self.core, self.resolved, self.ready, self._shut = core, resolved, ready, shut
        self._stepping = threading.Lock()
        # outputs received while another thread waited for a reply
        self._outputs: list[EngineOutput] = []
        self._replies: dict[int, Reply] = {}
        self._replied = threading.Condition()
        self._numbers = itertools.count(1)
        self._dead: EngineDeadError | None = None

    @property
    def engines(self) -> Sequence[InlineClient]:
        return [self]

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return self.ready

    def state(self) -> EngineState:
        dead = self._dead
        if dead is None:
            return EngineState(self.epoch, "ready", self.ready)
        return EngineState(self.epoch, "dead", self.ready, str(dead))

    def check(self) -> None:
        self._check_open()

    def stats(self, fresh: bool = False) -> EngineStats:
        return EngineStats(**self.call("stats")) if fresh else self.core.stats()

    def submit(self, request: EngineRequest) -> None:
        self._check_open()
        if self.resolved.executor in ("mp", "ray"):
            encoded(request)  # a plan that cannot be encoded would end the engine
        self.core.inbox.put(request)

    def abort(self, ids: list[str], why: FinishReason = "abort") -> None:
        self._check_open()
        self.core.inbox.put(Abort(ids, why))

    def outputs(self) -> list[EngineOutput]:
        with self._stepping:
            while not self._outputs:
                self._check_open()
                self._handle(self.core.receive(block=self.core.idle))
                self._check_open()
                try:
                    with interrupts_deferred():
                        self._handle(self.core.step())
                except KeyboardInterrupt:
                    raise
                except Exception as error:
                    self._dead = EngineDeadError(
                        f"the engine stopped: {type(error).__name__}: {error}"
                    )
                    self._shut()
                    raise self._dead from error
            outputs, self._outputs = self._outputs, []
            return outputs

    def call(self, name: str, *args: Any) -> Any:
        number = next(self._numbers)
        self._check_open()
        self.core.inbox.put(Call(number, name, list(args)))
        while True:
            # If no thread runs steps, this one receives the message, without running a step.
            if self._stepping.acquire(blocking=False):
                try:
                    self._handle(self.core.receive(block=False))
                finally:
                    self._stepping.release()
            with self._replied:
                if (reply := self._replies.pop(number, None)) is not None:
                    return answer(reply)
                self._check_open()
                self._replied.wait(0.01)

    def close(self) -> None:
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
            self.core.inbox.put(None)  # wakes the thread that waits for outputs
            with self._stepping:
                self._shut()

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def _handle(self, outbox: Outbox) -> None:
        for message in outbox:
            if isinstance(message, Reply):
                with self._replied:
                    self._replies[message.id] = message
                    self._replied.notify_all()
            else:
                self._outputs.append(message)


def answer(reply: Reply) -> Any:
    """The value of a reply; raises its error if it has one."""
    if reply.error is not None:
        raise ERRORS[reply.error_kind](reply.error)
    return reply.value


def encoded(message: ToEngine) -> bytes:
    """Raises ValidationError: the message contains a value that the protocol cannot encode."""
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as why:
        raise ValidationError(
            f"the request contains a value that cannot be sent to the engine's process: {why}"
        ) from why


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of the step: an interrupted step would leave core and worker inconsistent.

    A second Ctrl-C is not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is None or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        signal.raise_signal(signal.SIGINT)
