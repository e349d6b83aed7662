"""Engines ask one another for the outputs of experts, through sockets of the file system: only engines of one machine and user can.

    question: layer, dtype, N, D (QUESTION); N seats, int64; x_ND
    answer: state, dtype, N, D (ANSWER); y_ND, or N bytes of an error's text

Knows sockets and tensors. Does not know layers. A thread answers each engine, also while this one is idle or paused, so no engine
needs steps of the same number. A question changes nothing: one that lost its connection is asked again.

Shape suffixes: N pairs of a token and an expert, D features.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ExpertsLost
from quire.logging import get_logger
from quire.processes.child import is_stopped

log = get_logger(__name__)

QUESTION = struct.Struct("<4I")
ANSWER = struct.Struct("<4I")
OUTPUTS, ERROR, ABSENT = range(3)
"""States of an answer. ABSENT: the engine has no experts now, as while it loads."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_PAIRS = 2048
"""Pairs of a question; longer ones are asked in parts, so that the memory of who answers is bounded."""
MAX_FEATURES = 1 << 18
MAX_TEXT = 4096
GONE_S = 10.0
"""How long an engine waits for one that has ended, is stopped or has no experts: it may be starting again. Less than a step may
take at least (processes/watchdog.py)."""
SLOW_S = 60.0
"""How long it waits for an answer of one that runs."""
LOOK_S = 0.2
PEER = struct.Struct("3i")

Outputs = Callable[[Tensor, Tensor], Tensor]
"""y_ND of (x_ND, seat_N): the outputs of a layer's experts. Raises ValueError: they do not fit the layer."""


def socket_path(folder: str, engine: int, rank: int) -> Path:
    """Where a rank of an engine answers."""
    return Path(folder) / f"{engine}-{rank}"


class ExpertServer:
    """Answers the other engines, in threads of its own.

    Args:
        path: of the socket; one that an earlier process left is replaced.

    Attributes:
        layers: by number; empty: this engine has no experts now.
    """

    def __init__(self, path: Path):
        self.layers: list[Outputs] = []
        self._threads = torch.get_num_threads()
        with suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="expert-server", daemon=True).start()

    def close(self) -> None:
        """Accept no further engine."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(peer,), name="expert-answers", daemon=True
            ).start()

    def _serve(self, peer: socket.socket) -> None:
        """Answer one engine until it ends, or sends what is no question."""
        torch.set_num_threads(self._threads)  # of this thread
        with peer, torch.inference_mode():
            try:
                while True:
                    self._answer(peer)
            except EOFError:
                return
            except (OSError, ValueError) as error:
                log.warning("an engine that asked for experts was disconnected: %s", error)

    def _answer(self, peer: socket.socket) -> None:
        layer, kind, count, features = QUESTION.unpack(_read(peer, QUESTION.size))
        if kind >= len(DTYPES) or count > MAX_PAIRS or features > MAX_FEATURES:
            raise ValueError(f"a question of {count} pairs with {features} features, dtype {kind}")
        seat_N = torch.empty(count, dtype=torch.int64)
        x_ND = torch.empty(count, features, dtype=DTYPES[kind])
        for tensor in (seat_N, x_ND):
            _fill(peer, _bytes_of(tensor))
        layers = self.layers
        if not layers:
            peer.sendall(ANSWER.pack(ABSENT, 0, 0, 0))
            return
        try:
            if layer >= len(layers):
                raise ValueError(f"there is no layer {layer} with shared experts")
            y_ND = layers[layer](x_ND, seat_N).contiguous()
        except Exception as error:
            log.exception("the outputs of experts for another engine could not be computed")
            text = f"{type(error).__name__}: {error}".encode()[:MAX_TEXT]
            peer.sendall(ANSWER.pack(ERROR, 0, len(text), 0) + text)
            return
        peer.sendall(ANSWER.pack(OUTPUTS, DTYPES.index(y_ND.dtype), *y_ND.shape))
        peer.sendall(_bytes_of(y_ND))


class ExpertClient:
    """Asks the same rank of other engines. For one thread.

    Args:
        path: of the socket of an engine.
        gone_s, slow_s: limits of waiting, as GONE_S and SLOW_S.
    """

    def __init__(self, path: Callable[[int], Path], gone_s: float = GONE_S, slow_s: float = SLOW_S):
        self._path, self.gone_s, self.slow_s = path, gone_s, slow_s
        self._connections: dict[int, socket.socket] = {}
        self._unanswered: set[int] = set()  # engines with a question whose answer was not read

    def ask(self, engine: int, layer: int, seat_N: Tensor, x_ND: Tensor) -> Question:
        """Send the question, or its first part; the answer comes later."""
        if engine in self._unanswered:  # the step of that question has failed elsewhere
            self.drop(engine)
        parts = zip(torch.split(seat_N, MAX_PAIRS), torch.split(x_ND, MAX_PAIRS), strict=True)
        asked = Question(self, engine, layer, list(parts))
        with suppress(OSError):  # `answer` asks again
            asked.send(0)
        return asked

    def connection(self, engine: int) -> socket.socket:
        """Raises OSError: the engine does not listen."""
        if (made := self._connections.get(engine)) is None:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(LOOK_S)
            try:
                made.connect(str(self._path(engine)))
            except OSError:
                made.close()
                raise
            self._connections[engine] = made
        return made

    def drop(self, engine: int) -> None:
        """Forget a connection: what it sends next may belong to an earlier question."""
        self._unanswered.discard(engine)
        if (made := self._connections.pop(engine, None)) is not None:
            made.close()

    def expect(self, engine: int) -> None:
        """A question is on its way."""
        self._unanswered.add(engine)

    def answered(self, engine: int) -> None:
        """Its answer was read."""
        self._unanswered.discard(engine)

    def close(self) -> None:
        for engine in list(self._connections):
            self.drop(engine)


class Question:
    """The rows of one layer for the experts of another engine."""

    def __init__(
        self, client: ExpertClient, engine: int, layer: int, parts: list[tuple[Tensor, Tensor]]
    ):
        self._client, self._engine, self._layer, self._parts = client, engine, layer, parts
        self._sent = -1  # the part whose answer comes next
        self._since = time.monotonic()

    def answer(self) -> Tensor:
        """y_ND. Raises ExpertsLost: the engine does not answer in time, or could not compute it."""
        return torch.cat([self._answer_to(part) for part in range(len(self._parts))])

    def _answer_to(self, part: int) -> Tensor:
        self._since = time.monotonic()
        while True:
            reason = "it loads its weights, or sleeps"
            try:
                if self._sent != part:
                    self.send(part)
                if (message := self._receive(part)) is not None:
                    return message
            except (EOFError, OSError) as error:
                reason = f"it has ended or is stopped: {error}"
                self._client.drop(self._engine)
            except BaseException:
                self._client.drop(self._engine)
                raise
            self._sent = -1
            if time.monotonic() - self._since > self._client.gone_s:
                raise self._lost(f"{reason} (waited {self._client.gone_s:g} s)")
            time.sleep(LOOK_S / 4)

    def send(self, part: int) -> None:
        """Raises OSError: the connection is lost."""
        seat_N, x_ND = self._parts[part]
        peer, kind = self._client.connection(self._engine), DTYPES.index(x_ND.dtype)
        self._client.expect(self._engine)
        head = memoryview(QUESTION.pack(self._layer, kind, *x_ND.shape))
        try:
            for data in (head, _bytes_of(seat_N), _bytes_of(x_ND)):
                _move(peer.send, data, lambda: self._look(peer))
        except BaseException:
            self._client.drop(self._engine)
            raise
        self._sent = part

    def _receive(self, part: int) -> Tensor | None:
        """y_ND of a part; None: the engine has no experts now."""
        peer = self._client.connection(self._engine)
        look = lambda: self._look(peer)  # noqa: E731
        state, kind, count, features = ANSWER.unpack(_read(peer, ANSWER.size, look))
        if state == ABSENT:
            self._client.answered(self._engine)
            return None
        if state == ERROR:
            raise self._lost(_read(peer, min(count, MAX_TEXT), look).decode(errors="replace"))
        if (count, features) != self._parts[part][1].shape or kind >= len(DTYPES):
            raise self._lost(f"it sent {count} outputs of {features} features")
        y_ND = torch.empty(count, features, dtype=DTYPES[kind])
        _fill(peer, _bytes_of(y_ND), look)
        self._client.answered(self._engine)
        return y_ND

    def _look(self, peer: socket.socket) -> None:
        """Raises TimeoutError: the engine is stopped. ExpertsLost: it runs, and needs too long."""
        waited = time.monotonic() - self._since
        if waited > self._client.gone_s:
            pid = _process_of(peer)
            if pid is not None and is_stopped(pid):
                raise TimeoutError(f"process {pid} is stopped (SIGSTOP, or a debugger)")
        if waited > self._client.slow_s:
            raise self._lost(f"it did not answer in {self._client.slow_s:g} s")

    def _lost(self, why: str) -> ExpertsLost:
        text = f"engine {self._engine}, which has experts of this model, does not answer: {why}"
        log.error("%s", text)
        return ExpertsLost(text)


def _process_of(peer: socket.socket) -> int | None:
    """The process that listens; None: this system does not say."""
    if (option := getattr(socket, "SO_PEERCRED", None)) is None:
        return None
    pid: int = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, option, PEER.size))[0]
    return pid


# -- bytes ------------------------------------------------------------------------------------------
def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _read(peer: socket.socket, count: int, look: Callable[[], None] = lambda: None) -> bytes:
    into = bytearray(count)
    _fill(peer, memoryview(into), look)
    return bytes(into)


def _fill(peer: socket.socket, into: memoryview, look: Callable[[], None] = lambda: None) -> None:
    """Read as many bytes as fit. Raises EOFError: the other side has ended."""
    _move(peer.recv_into, into, look)


def _move(move: Callable[[memoryview], int], left: memoryview, look: Callable[[], None]) -> None:
    while left:
        try:
            count = move(left)
        except TimeoutError:
            look()
            continue
        if not count:
            raise EOFError("the other side has closed the connection")
        left = left[count:]
