"""Client side of the grammar processes, which compile grammars and compute their masks.

Knows sockets, time and one program (`grammar_server.py`). Does not know tensors. A process that ends, or does not
answer in time, raises `ProcessEnded` for its own grammar only.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

import quire
from quire import env
from quire.errors import ConfigError
from quire.features.structured.grammar_messages import (
    END,
    FORK,
    ORDER,
    STEP_CPU_S,
    Begin,
    Check,
    Compile,
    Compiled,
    Drop,
    Fed,
    Filled,
    Prepare,
    Prepared,
    ProcessEnded,
    Step,
    receive,
    send,
)
from quire.features.structured.grammar_rows import PlaceSettings
from quire.features.structured.refusal import Refused
from quire.features.structured.vocabulary import Vocabulary
from quire.protocol.structured_outputs import StructuredOutputsParams

START_S = 120.0  # to read the vocabulary, and for xgrammar to import torch
STEP_S = 2.0  # wall-clock limit of a message of a step; STEP_CPU_S and ROW_CPU_S limit its processor time
COMPILE_WALL = 5  # wall-clock limit of a compile, times its CPU limit: other work shares the cores
encode = msgspec.msgpack.encode
T = TypeVar("T")


class Forkers:
    """Makes grammar processes, by a forker process that it starts on first use and again after it ends. Thread-safe.

    Args:
        vocabulary: None: the processes can only check grammars.
        xgrammar: the processes have xgrammar's compiler.
    """

    def __init__(self, vocabulary: Vocabulary | None = None, xgrammar: bool = False):
        self.vocabulary, self.xgrammar = vocabulary, xgrammar
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._control: socket.socket | None = None
        self._words = 0
        self.close: weakref.finalize[Any, Any] | None = None

    def fork(self) -> GrammarProcess:
        """Fork a process. Raises ConfigError: no readable tokenizer. ProcessEnded: no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            control, number = self._started(), next(self._numbers)
            try:
                socket.send_fds(control, [ORDER.pack(FORK, number)], [theirs.fileno()])
            except OSError as error:
                ours.close()
                if self.close is not None:
                    self.close()
                raise ProcessEnded(str(error)) from error
        return GrammarProcess(ours, control, number, self._words)

    def start(self) -> None:
        """Start the forker, which reads the vocabulary. Blocks."""
        with self._lock:
            self._started()

    def _started(self) -> socket.socket:
        if self._control is not None and self.close is not None and self.close.alive:
            return self._control
        text = None if self.vocabulary is None else self.vocabulary.text()
        size = 0 if self.vocabulary is None else self.vocabulary.size
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quire.features.structured.grammar_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=environment(),
            )  # fmt: skip
        self.close = close = weakref.finalize(self, _end, ours, process)
        try:
            send(ours, encode(Prepare(text, size, self.xgrammar)))
            told = msgspec.msgpack.decode(receive(ours, time.monotonic() + START_S), type=Prepared)
        except ProcessEnded:
            close()
            raise
        if told.error is not None:
            close()
            raise ConfigError(told.error)
        ours.settimeout(None)
        self._control, self._words = ours, told.words
        return ours


def environment() -> dict[str, str]:
    """The environment that the process needs, without secrets."""
    return {
        **env.bare_for_a_child(),
        "PYTHONPATH": str(Path(quire.__file__).parents[1]),
        "QUIRE_MAX_SCHEMA_NESTING": str(env.get("MAX_SCHEMA_NESTING")),
        "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of address space, which counts as memory
        "OMP_NUM_THREADS": "1",
    }


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()  # the forker then kills its children and ends
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:  # it is still reading the vocabulary
        process.kill()
        process.wait()


class GrammarProcess:
    """The process of one grammar. Hold `turn` while you talk to it; any thread may `close` it."""

    def __init__(self, pipe: socket.socket, control: socket.socket, number: int, words: int):
        self.pipe, self.words = pipe, words
        self.bytes = 0
        self.turn = threading.Lock()
        self.overran = False
        """The process ended after it had worked on a message for STEP_CPU_S: the message exceeded its limit."""
        self._asked_at = 0.0
        self._told = 0
        self.close = weakref.finalize(self, _end_one, pipe, control, number)

    @property
    def alive(self) -> bool:
        """False: it was closed, or a call found that it had ended."""
        return self.close.alive

    def check(
        self, constraint: StructuredOutputsParams, engine: str, second: bool, cpu_s: float
    ) -> str | None:
        """As `validate.verdict`. Raises ProcessEnded: it exceeds its limits."""
        asked = Check(constraint, engine, second, cpu_s)
        return self._ask(asked, COMPILE_WALL * cpu_s).refused

    def compile(
        self, constraint: StructuredOutputsParams, cpu_s: float, memory: int, nice: int
    ) -> None:
        """Compile the grammar and compute its first mask.

        Raises:
            ProcessEnded: it needs more processor time or memory than `cpu_s` and `memory`.
            Refused: it cannot be enforced.
        """
        told = self._ask(Compile(constraint, cpu_s, memory, nice), COMPILE_WALL * cpu_s)
        if told.refused is not None:
            self.close()
            raise Refused(told.refused)
        self.bytes = told.bytes

    def _ask(self, message: Any, seconds: float) -> Compiled:
        until = time.monotonic() + seconds
        self.send(message, until)
        return self._decoded(until, Compiled)

    def begin(
        self, number: int, settings: PlaceSettings, outputs: Sequence[int], until: float
    ) -> tuple[Filled, np.ndarray]:
        """Enter a row; returns its state and its mask."""
        self.send(Begin(number, settings, list(outputs)), until)
        return self.filled(until)

    def step(self, rows: list[tuple[int, int]], until: float) -> None:
        """Send sampled tokens (row number, token). Read the answers with `fed`, then `filled`."""
        self.send(Step(rows), until)

    def fed(self, until: float) -> Fed:
        return self._decoded(until, Fed)

    def filled(self, until: float) -> tuple[Filled, np.ndarray]:
        told = self._decoded(until, Filled)
        self.bytes = told.bytes
        masks = np.frombuffer(self._read(until), np.int32)
        if len(masks) != len(told.over) * self.words:
            self.close()
            raise ProcessEnded("its masks are of another size")
        return told, masks.reshape(len(told.over), self.words)

    def drop(self, number: int) -> None:
        with contextlib.suppress(ProcessEnded):
            self.send(Drop(number), time.monotonic() + STEP_S)

    def send(self, message: Any, until: float) -> None:
        self._asked_at = time.monotonic()
        try:
            self.pipe.settimeout(max(until - time.monotonic(), 0.001))
            send(self.pipe, encode(message))
        except (ProcessEnded, OSError) as error:
            self.close()
            raise ProcessEnded(str(error)) from error

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
            self.overran = time.monotonic() - self._asked_at >= STEP_CPU_S
            self.close()
            raise


def _end_one(pipe: socket.socket, control: socket.socket, number: int) -> None:
    pipe.close()
    with contextlib.suppress(OSError):
        control.send(ORDER.pack(END, number), socket.MSG_DONTWAIT)
