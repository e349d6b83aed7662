"""A core as a process: `python -m quire.engine.process FOLDER PARENT`, its configuration on stdin.

Knows sockets, signals and how to die: with a last message that says why, and never later than its
parent. One thread reads what comes and puts it into the core's inbox; the main thread is the loop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType

import msgspec
import zmq

from quire.engine.core import EngineCore
from quire.errors import QuireError
from quire.logging import get_logger
from quire.protocol.output import Died, FromEngine
from quire.protocol.request import ToEngine

log = get_logger(__name__)

PR_SET_PDEATHSIG = 1
STATS_EVERY_S = 1.0


class Stop(Exception):
    """SIGTERM."""


class Link:
    """The child's ends of the two sockets."""

    def __init__(self, folder: str):
        self.context = zmq.Context()
        self.down = self.context.socket(zmq.PULL)
        self.up = self.context.socket(zmq.PUSH)
        for socket in (self.down, self.up):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.down.connect(f"ipc://{folder}/down")
        self.up.connect(f"ipc://{folder}/up")
        self.encoder = msgspec.msgpack.Encoder()

    def send(self, messages: list[FromEngine]) -> None:
        self.up.send(self.encoder.encode(messages))

    def read_into(self, core: EngineCore) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            message = self.down.recv()
            try:
                core.inbox.put(decoder.decode(message))
            except msgspec.DecodeError:
                log.exception("a message of %d bytes could not be read", len(message))

    def close(self) -> None:
        self.up.close(linger=1000)
        # The reading thread still waits on `down`; the process ends with it.


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; where there is no such thing, look now and then."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        log.debug("no prctl here")
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def stop(number: int, frame: FrameType | None) -> None:
    raise Stop


def loop(core: EngineCore, link: Link) -> None:
    """Until SIGTERM, or an error that no request can be blamed for."""
    told = 0.0
    while True:
        outbox: list[FromEngine] = list(core.turn())
        now = time.monotonic()
        if now - told > STATS_EVERY_S or (outbox and not core.scheduler.has_requests):
            told = now
            outbox.append(core.stats())
        if outbox:
            link.send(outbox)


def main(folder: str, parent: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, stop)
    die_with(parent)
    link = Link(folder)
    core: EngineCore | None = None
    try:
        from quire.config.wire import from_wire
        from quire.engine.assemble import build_core

        core, ready = build_core(from_wire(sys.stdin.buffer.read()))
        link.send([ready])
        threading.Thread(target=link.read_into, args=(core,), name="reader", daemon=True).start()
        loop(core, link)
    except Stop:
        return 0
    except QuireError as error:
        link.send([Died(str(error))])
        return 1
    except BaseException as error:
        log.exception("the engine stopped")
        link.send([Died(f"{type(error).__name__}: {error}", traceback.format_exc())])
        return 1
    finally:
        if core is not None:
            core.executor.close()
        link.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)
