"""ProcessClient: a core in another process, reached over ZMQ.

Knows sockets, the life and death of one child, and bytes. Does not know requests, except that they
have an encoding. Two rules keep it from hanging: every wait has an end, and at the end it looks
whether the child still lives.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import msgspec
import zmq

from quire.config.engine import Resolved
from quire.config.wire import to_wire
from quire.engine.client import answer
from quire.errors import EngineDeadError, StartupError
from quire.protocol.output import Died, EngineOutput, EngineStats, FromEngine, Ready, Reply
from quire.protocol.request import Abort, Call, EngineRequest, ToEngine

LOOK_AGAIN_MS = 200  # how often a wait looks whether the child still lives


class ProcessClient:
    """An EngineClient. `wait_ready` must have returned before `ready` is read."""

    ready: Ready

    def __init__(self, resolved: Resolved):
        self.resolved = resolved
        self._folder = tempfile.mkdtemp(prefix="quire-")
        self._context = zmq.Context()
        self._down = self._bind(zmq.PUSH, "down")
        self._up = self._bind(zmq.PULL, "up")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._held: list[EngineOutput] = []
        self._replies: dict[int, Reply] = {}
        self._replied = threading.Condition()
        self._numbers = itertools.count(1)
        self._dead: EngineDeadError | None = None
        self.stats = EngineStats()  # the latest that came by itself
        self.process = self._spawn(to_wire(resolved))

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the requests that the scheduler admits
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    def _spawn(self, payload: bytes) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "quire.engine.process", self._folder, str(os.getpid())]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        stdin = child.stdin
        if stdin is not None:
            stdin.write(payload)
            stdin.close()
        return child

    def wait_ready(self, timeout: float | None = None) -> Ready:
        """Block until the model is loaded.

        Raises:
            StartupError: it could not start (with the child's own message), or not in `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while end is None or time.monotonic() < end:
            for message in self._receive():
                if isinstance(message, Ready):
                    self.ready = message
                    return message
                if isinstance(message, Died):
                    self.close()
                    raise StartupError(message.error, message.traceback)
            if (code := self.process.poll()) is not None:
                self.close()
                raise StartupError(f"the engine process ended at start with exit code {code}")
        self.close()
        raise StartupError(f"the engine was not ready after {timeout:.0f} s")

    # -- what a front room asks -----------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        self._send(request)

    def abort(self, ids: list[str]) -> None:
        self._send(Abort(ids))

    def call(self, name: str, *args: Any) -> Any:
        number = next(self._numbers)
        self._send(Call(number, name, list(args)))
        while True:
            if self._reading.acquire(blocking=False):  # nobody else takes messages in
                try:
                    self._keep(self._receive(10))
                finally:
                    self._reading.release()
            with self._replied:
                if (reply := self._replies.pop(number, None)) is not None:
                    return answer(reply)
                self._alive()
                self._replied.wait(0.01)

    def outputs(self) -> list[EngineOutput]:
        with self._reading:
            while not self._held:
                self._alive()
                self._keep(self._receive())
            outputs, self._held = self._held, []
            return outputs

    def close(self, patience: float = 5.0) -> None:
        """Stop the child: asked, then told, then killed."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with self._sending, self._reading:
            self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- messages -------------------------------------------------------------------------------
    def _send(self, message: ToEngine) -> None:
        self._alive()
        with self._sending:
            self._down.send(self._encoder.encode(message))

    def _receive(self, wait_ms: int = LOOK_AGAIN_MS) -> list[FromEngine]:
        try:
            if not self._up.poll(wait_ms):
                return []
            return self._decoder.decode(self._up.recv())
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine was shut down") from error

    def _keep(self, messages: list[FromEngine]) -> None:
        for message in messages:
            match message:
                case EngineOutput():
                    self._held.append(message)
                case Reply():
                    with self._replied:
                        self._replies[message.id] = message
                        self._replied.notify_all()
                case EngineStats():
                    self.stats = message
                case Died():
                    self._dead = EngineDeadError(message.error)

    def _alive(self) -> None:
        if self._dead is None and (code := self.process.poll()) is not None:
            self._dead = EngineDeadError(f"the engine process ended with exit code {code}")
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
