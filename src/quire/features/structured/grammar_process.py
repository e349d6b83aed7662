"""Client side of the grammar processes, which compile grammars and compute their masks.

Knows sockets, time and one program (`grammar_server.py`). Does not know tensors. A process that ends, or does not
answer in time, raises `ProcessEnded` for its own grammar only.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait as ready_for_reading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import quire
from quire import env
from quire.errors import ConfigError
from quire.features.structured.errors import CompileDelayed, UnsupportedConstraint
from quire.features.structured.grammar_messages import (
    END,
    FORK,
    ORDER,
    STEP_CPU_S,
    Begin,
    Check,
    Compile,
    CompileReply,
    Drop,
    ForcedReply,
    GrammarRowSettings,
    LookAhead,
    LookAheadReply,
    MaskReply,
    Prepare,
    PrepareReply,
    Step,
)
from quire.features.structured.vocabulary import Vocabulary
from quire.logging import get_logger
from quire.processes.isolated_child import IsolatedChild, ProcessEnded, receive, send
from quire.protocol.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np

log = get_logger(__name__)

START_S = 120.0  # to read the vocabulary
STEP_S = 2.0  # wall-clock limit of a message of a step; STEP_CPU_S and ROW_CPU_S limit its processor time
COMPILE_WALL = 30  # wall-clock limit of a compile, times its CPU limit: other work shares the cores
BUSY = "the machine is too busy to compile the grammar; send the request again later"
encode = msgspec.msgpack.encode
T = TypeVar("T")


class GrammarForkServer:
    """Makes grammar processes, by a fork server process that it starts on first use and again after it ends. Thread-safe.

    Args:
        vocabulary: None: the processes can only check grammars.
    """

    def __init__(self, vocabulary: Vocabulary | None = None):
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.server: IsolatedChild | None = None
        self._words = 0
        self._spare: GrammarProcess | None = None
        self.close: weakref.finalize[Any, Any] | None = None

    def fork(self) -> GrammarProcess:
        """A new process. Raises ConfigError: no readable tokenizer. ProcessEnded: no process can be started."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.ready():
            return spare
        try:
            return self._fork()
        except ProcessEnded:  # the fork server was killed: this starts a new one
            return self._fork()

    def fork_spare(self) -> None:
        """Fork the process that the next `fork` returns, which then does not wait for it."""
        if self._spare is None:
            with contextlib.suppress(ProcessEnded, ConfigError):
                self._spare = self._fork()

    def _fork(self) -> GrammarProcess:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                control, number = self._started(), next(self._numbers)
                socket.send_fds(control, [ORDER.pack(FORK, number)], [theirs.fileno()])
            except OSError as error:
                ours.close()
                if self.close is not None:
                    self.close()
                raise ProcessEnded(str(error)) from error
            except BaseException:
                ours.close()
                raise
        return GrammarProcess(ours, control, number, self._words)

    def _started(self) -> socket.socket:
        if self.server is not None and self.close is not None and self.close.alive:
            return self.server.pipe
        text = None if self.vocabulary is None else self.vocabulary.text()
        size = 0 if self.vocabulary is None else self.vocabulary.size
        self.server = server = IsolatedChild(
            "quire.features.structured.grammar_server", **environment()
        )
        # It kills its children when the socket is closed. While it reads the vocabulary, it does not notice.
        self.close = close = weakref.finalize(self, server.end, 1.0)
        message = encode(Prepare(text, size))
        try:
            answer = server.ask(message, time.monotonic() + START_S)
            reply = msgspec.msgpack.decode(answer, type=PrepareReply)
        except ProcessEnded:
            close()
            raise
        if reply.error is not None:
            close()
            raise ConfigError(reply.error)
        self._words = reply.words
        server.pipe.settimeout(None)
        return server.pipe


def environment() -> dict[str, str]:
    """The variables that the fork server needs."""
    return {
        "PYTHONPATH": str(Path(quire.__file__).parents[1]),
        "QUIRE_MAX_SCHEMA_NESTING": str(env.get("MAX_SCHEMA_NESTING")),
        "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of address space, which counts as memory
        "OMP_NUM_THREADS": "1",
    }


class GrammarProcess:
    """The process of one grammar. Hold `lock` while you talk to it; any thread may `close` it."""

    def __init__(self, pipe: socket.socket, control: socket.socket, number: int, words: int):
        self.pipe, self.words = pipe, words
        self.bytes = 0
        self.lock = threading.Lock()
        self.exceeded_limit = False
        """The process ended after it had worked on a message for STEP_CPU_S: the message exceeded its limit."""
        self._sent_at = 0.0
        self.close = weakref.finalize(self, _end_one, pipe, control, number)

    @property
    def alive(self) -> bool:
        """False: it was closed, or a call found that it had ended."""
        return self.close.alive

    def ready(self) -> bool:
        """Whether it still runs, for a process that has got no message yet."""
        return not ready_for_reading([self.pipe], 0)  # readable: it has ended

    def check(self, constraint: StructuredOutputsParams, cpu_s: float) -> str | None:
        """As `validate.fault_of`. Raises ProcessEnded: it exceeds its limits; CompileDelayed: the machine is too busy."""
        return self._ask(Check(constraint, cpu_s), COMPILE_WALL * cpu_s).error

    def compile(
        self, constraint: StructuredOutputsParams, cpu_s: float, memory: int, nice: int
    ) -> None:
        """Compile the grammar and compute its first mask.

        Raises:
            ProcessEnded: it needs more processor time or memory than `cpu_s` and `memory`.
            CompileDelayed: the machine is too busy.
            UnsupportedConstraint: it cannot be enforced.
        """
        reply = self._ask(Compile(constraint, cpu_s, memory, nice), COMPILE_WALL * cpu_s)
        if reply.error is not None:
            self.close()
            log.info("a constraint is refused: %s (%s)", reply.error, reply.cause)
            raise UnsupportedConstraint(reply.error)
        self.bytes = reply.bytes

    def _ask(self, message: Any, seconds: float) -> CompileReply:
        until = time.monotonic() + seconds
        try:
            self.send(message, until)
            return self._decoded(until, CompileReply)
        except ProcessEnded as error:
            if time.monotonic() < until:
                raise
            raise CompileDelayed(BUSY) from error

    def begin(
        self, number: int, settings: GrammarRowSettings, outputs: Sequence[int], until: float
    ) -> tuple[MaskReply, np.ndarray]:
        """Enter a row; returns its state and its mask."""
        self.send(Begin(number, settings, list(outputs)), until)
        return self.read_masks(until)

    def step(self, rows: list[tuple[int, list[int]]], until: float) -> None:
        """Send sampled tokens (row number, tokens). Read the answers with `read_forced`, then `read_masks`."""
        self.send(Step(rows), until)

    def read_forced(self, until: float) -> ForcedReply:
        return self._decoded(until, ForcedReply)

    def read_masks(self, until: float) -> tuple[MaskReply, np.ndarray]:
        reply = self._decoded(until, MaskReply)
        self.bytes = reply.bytes
        return reply, self._masks(len(reply.over), until)

    def _masks(self, count: int, until: float) -> np.ndarray:
        import numpy as np  # 0.1 s, which a server that only checks grammars does not need

        masks = np.frombuffer(self._read(until) if count else b"", np.int32)
        if len(masks) != count * self.words:
            self.close()
            raise ProcessEnded("its masks have a different size")
        return masks.reshape(count, self.words)

    def look_ahead(self, rows: list[tuple[int, list[int], int]], until: float) -> None:
        """Send draft tokens (row number, tokens, the most that the row may have). Read the answer with `read_ahead`."""
        self.send(LookAhead(rows), until)

    def read_ahead(self, until: float) -> tuple[LookAheadReply, np.ndarray]:
        """By row the draft tokens that may follow; and the masks after each of them."""
        reply = self._decoded(until, LookAheadReply)
        count = sum(map(len, reply.drafts))
        return reply, self._masks(count, until)

    def drop(self, number: int) -> None:
        with contextlib.suppress(ProcessEnded):
            self.send(Drop(number), time.monotonic() + STEP_S)

    def send(self, message: Any, until: float) -> None:
        self._sent_at = time.monotonic()
        try:
            send(self.pipe, encode(message), until)
        except ProcessEnded:
            self.close()
            raise

    def _decoded(self, until: float, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(self._read(until), type=kind)
        except msgspec.DecodeError as error:
            self.close()
            raise ProcessEnded(str(error)) from error

    def _read(self, until: float) -> bytearray:
        try:
            return receive(self.pipe, until)
        except ProcessEnded:
            self.exceeded_limit = time.monotonic() - self._sent_at >= STEP_CPU_S
            self.close()
            raise


def _end_one(pipe: socket.socket, control: socket.socket, number: int) -> None:
    pipe.close()
    with contextlib.suppress(OSError):
        control.send(ORDER.pack(END, number), socket.MSG_DONTWAIT)
