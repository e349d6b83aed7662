"""A core as a process: `python -m quire.engine.engine_process FOLDER GENERATION FRONTENDS LIFELINE PARENT`.

Its configuration comes on stdin. Knows sockets, signals and how to die: with a last message that says why,
and never later than its parent. One thread takes in what comes, one shows that we live; the main thread is the loop.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from quire import env
from quire.engine import sleep_state
from quire.engine.core import Answered, EngineCore
from quire.engine.flight_recorder import FlightRecorder, RecordingExecutor
from quire.engine.status_pipe import STOP, StatusWriter
from quire.engine.watchdog import TimedExecutor, Watchdog
from quire.errors import QuireError
from quire.logging import configure, get_logger
from quire.platforms.cpu_affinity import leave_a_core
from quire.protocol.output import EngineDied, EngineOutput, EngineStats, FromEngine, Reply
from quire.protocol.request import Head, RequestHead, ToEngine

log = get_logger(__name__)

PR_SET_PDEATHSIG = 1
STATS_EVERY_S = 1.0
COLLECT_AFTER = (
    20_000,
    20,
    50,
)  # new objects, then collections of the younger; Python's own begins with 700


class StopEngine(BaseException):
    """Our host said so. No Exception: it may come in the middle of whatever catches those."""


class FrontendSockets:
    """The child's ends of the sockets: one that all front rooms push into, and one to each of them."""

    def __init__(self, folder: Path, frontends: int):
        context = zmq.Context()
        self.down = context.socket(zmq.PULL)
        self.up = [context.socket(zmq.PUSH) for _ in range(frontends)]
        for socket in (self.down, *self.up):
            socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the requests that the scheduler admits
            socket.setsockopt(zmq.RCVHWM, 0)
        self.down.bind(f"ipc://{folder}/down")
        for number, socket in enumerate(self.up):
            socket.connect(f"ipc://{folder}/up-{number}")
        self.encoder = msgspec.msgpack.Encoder()

    def send(self, messages: list[EngineOutput | Reply]) -> None:
        """Each to the front room that asked."""
        if len(self.up) == 1:
            self.up[0].send(self.encoder.encode(messages))
            return
        parts: dict[int, list[FromEngine]] = {}
        for message in messages:
            parts.setdefault(message.client, []).append(message)
        for client, part in parts.items():
            if 0 <= client < len(self.up):
                self.up[client].send(self.encoder.encode(part))

    def tell_all(self, stats: EngineStats) -> None:
        data = self.encoder.encode([stats])
        for socket in self.up:
            socket.send(data)

    def read_into(self, core: EngineCore) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            data = self.down.recv()
            message: ToEngine | Answered | None
            try:
                message = decoder.decode(data)
            except Exception:  # this thread must outlive any message
                log.exception("a message of %d bytes could not be decoded", len(data))
                message = undecoded(data)
            core.inbox.put(message)

    def close(self) -> None:
        for socket in self.up:
            socket.close(linger=1000)
        # The reading thread still waits on `down`; the process ends with it.


def undecoded(data: bytes) -> Answered | None:
    """The answer to a message that could not be decoded; None if even its head cannot be."""
    try:
        head = msgspec.msgpack.decode(data, type=Head)
    except Exception:
        log.exception("the message cannot be answered: its head could not be decoded")
        return None
    error = "the engine could not decode this message; the server's log has the reason"
    if isinstance(head, RequestHead):
        return EngineOutput(head.id, [], "error", error=error, client=head.client)
    return Reply(head.id, error=error, client=head.client)


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
    raise StopEngine


def loop(core: EngineCore, link: FrontendSockets, pulse: Watchdog) -> None:
    """Until told to stop, or an error that no request can be blamed for."""
    told = 0.0
    while True:
        outbox = core.receive(block=core.idle)
        with pulse.working():
            outbox += core.step()
        if outbox:
            link.send(outbox)
        now = time.monotonic()
        if core.idle or now - told > STATS_EVERY_S:
            told = now
            link.tell_all(core.stats())


def serve(folder: Path, frontends: int, speaker: StatusWriter) -> None:
    """Build the engine, say that it is ready, run it."""
    from quire.config.serialize import resolved_from_bytes
    from quire.engine.assemble import build_core

    link = FrontendSockets(folder, frontends)
    told = folder.parent / sleep_state.FILE
    resolved = resolved_from_bytes(sys.stdin.buffer.read())
    if resolved.device == "cpu":
        leave_a_core()
    core, ready = build_core(resolved)
    pulse = Watchdog(first=float(env.get("EXECUTE_MODEL_TIMEOUT_SECONDS")))
    core.executor = TimedExecutor(core.executor, pulse)
    # A function may load a model; nobody is served meanwhile, so it must not take for ever either.
    longest = float(env.get("ENGINE_READY_TIMEOUT_S"))
    core.functions = sleep_state.persisting(core.functions, told)
    core.functions = {name: pulse.bound(f, longest) for name, f in core.functions.items()}
    if env.get("FLIGHT_RECORDER"):
        core.counts["recorder_stops"] = 0.0
        stopped = partial(core.counts.update, recorder_stops=1.0)
        core.executor = RecordingExecutor(core.executor, FlightRecorder(folder), stopped)
    # What was built stays; without this a collection walks all of it in the middle of a step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    threading.Thread(target=link.read_into, args=(core,), name="reader", daemon=True).start()
    sleep_state.restore_sleep_state(core.functions, told)
    speaker.send(ready)
    pulse.send_by(speaker.send)
    try:
        loop(core, link, pulse)
    finally:
        core.executor.close()
        link.close()


def main(folder: Path, frontends: int, lifeline: int, parent: int) -> int:
    configure("engine")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group; the parent decides
    signal.signal(STOP, stop)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with(parent)
    speaker = StatusWriter(lifeline)
    try:
        serve(folder, frontends, speaker)
    except StopEngine:
        return 0
    except QuireError as error:
        speaker.send(EngineDied(str(error)))
        return 1
    except BaseException as error:
        speaker.send(EngineDied(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


if __name__ == "__main__":
    place, generation, count, pipe, keeper = sys.argv[1:]
    code = main(Path(place) / generation, int(count), int(pipe), int(keeper))
    with suppress(OSError):  # nobody reads any more, or the disk is full
        sys.stdout.flush()
    os._exit(code)
