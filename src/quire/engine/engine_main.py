"""The engine as a process: `python -m quire.engine.engine_main FOLDER EPOCH FRONTENDS STATUS PARENT`.

It reads its configuration from stdin. Knows sockets and signals. When the process ends, it sends a last message with
the reason, and it never outlives its parent. One thread receives messages, one sends heartbeats; the main thread runs
the loop.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from quire import env
from quire.engine import sleep
from quire.engine.core import Answered, EngineCore
from quire.engine.engine_sockets import FrontendSockets
from quire.errors import EngineDeadError, QuireError
from quire.logging import configure, get_logger
from quire.platforms.cpu_affinity import leave_a_core
from quire.processes.child import STOP, begin_child, exit_child
from quire.processes.status_pipe import StatusWriter
from quire.processes.watchdog import Watchdog
from quire.protocol.output import (
    EngineDied,
    EngineOutput,
    EngineStats,
    FromEngine,
    Reply,
    StartupStatus,
)
from quire.protocol.request import Head, RequestHead, ToEngine
from quire.protocol.tensor_data import FrameEncoder

log = get_logger(__name__)

STATS_EVERY_S = 0.1
LOOK_EVERY_S = 1.0


class StopEngine(BaseException):
    """The parent ordered a stop. Not an Exception: it may arrive inside any `except Exception`."""


class FrontendLink(FrontendSockets):
    """Sends outputs to frontends, and reads what they send."""

    def __init__(self, folder: Path, frontends: int):
        super().__init__(zmq.Context(), folder, frontends)
        self.encoder = FrameEncoder()

    def send(self, messages: list[EngineOutput | Reply]) -> None:
        """Send each message to the frontend that it is for."""
        messages = [sendable(each) if isinstance(each, Reply) else each for each in messages]
        if len(self.up) == 1:
            self._send(self.up[0], messages)
            return
        parts: dict[int, list[FromEngine]] = {}
        for message in messages:
            parts.setdefault(message.client, []).append(message)
        for client, part in parts.items():
            if 0 <= client < len(self.up):
                self._send(self.up[client], part)

    def send_stats(self, stats: EngineStats) -> None:
        for socket in self.up:
            self._send(socket, [stats])

    def _send(self, socket: zmq.Socket[bytes], messages: Sequence[FromEngine]) -> None:
        frames = self.encoder.encode(messages)
        if len(frames) == 1:
            socket.send(frames[0])
        else:
            socket.send_multipart(frames, copy=False)

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
        # The reading thread still waits on `down`; it ends with the process.


def undecoded(data: bytes) -> Answered | None:
    """The answer to a message that could not be decoded; None if not even its head could be decoded."""
    try:
        head = msgspec.msgpack.decode(data, type=Head)
    except Exception:
        log.exception("no reply to the message: its head could not be decoded")
        return None
    error = "the engine could not decode this message; see the server's log"
    if isinstance(head, RequestHead):
        return EngineOutput(head.id, [], "error", error=error, client=head.client)
    return Reply(head.id, error=error, client=head.client)


def sendable(reply: Reply) -> Reply:
    """The reply; an error if its value cannot go to another process: a function of a worker may return anything."""
    try:
        msgspec.msgpack.decode(FrameEncoder().encode(reply)[0])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as why:
        log.error("the answer to a call cannot be sent: %s", why)
        error = f"TypeError: the answer cannot be sent to another process: {why}"
        return Reply(reply.id, error=error, client=reply.client)
    return reply


def stop(number: int, frame: FrameType | None) -> None:
    raise StopEngine


def loop(core: EngineCore, sockets: FrontendLink, watchdog: Watchdog) -> None:
    """Run until a stop, or until an error that is not one request's."""
    sent_at = 0.0
    while True:
        outbox = core.receive(block=core.idle)
        with watchdog.working():
            outbox += core.step()
        if outbox:
            sockets.send(outbox)
        now = time.monotonic()
        if core.idle or now - sent_at > STATS_EVERY_S:
            sent_at = now
            sockets.send_stats(core.stats())


def watch_workers(core: EngineCore) -> None:
    """End the engine when a worker's process has ended while no step waits for it."""

    def watch() -> None:
        while not (core.idle and (reason := core.executor.lost())):
            time.sleep(LOOK_EVERY_S)
        core.broken = EngineDeadError(reason)
        core.inbox.put(None)

    threading.Thread(target=watch, name="worker-watch", daemon=True).start()


def serve(folder: Path, frontends: int, status: StatusWriter) -> None:
    """Build the engine, report that it is ready, run it."""
    from quire.config.serialize import resolved_from_bytes
    from quire.engine.build import add_process_observers, build_core

    sockets = FrontendLink(folder, frontends)
    sleep_file = folder.parent / sleep.FILE
    resolved = resolved_from_bytes(sys.stdin.buffer.read())
    if (rank := resolved.config.parallel.data_parallel_rank) is not None:
        configure(f"engine {rank}")
    if resolved.device == "cpu":
        leave_a_core()
    core, ready = build_core(
        resolved, lambda stage, share: status.send(StartupStatus(stage, share))
    )
    watchdog = Watchdog(first=float(env.get("EXECUTE_MODEL_TIMEOUT_SECONDS")))
    add_process_observers(core, watchdog, folder)
    # A function may load a model. No request is served in the meantime, so it has a time limit too.
    longest = float(env.get("ENGINE_READY_TIMEOUT_S"))
    core.functions = sleep.persisting(core.functions, sleep_file)
    core.functions = {name: watchdog.bound(f, longest) for name, f in core.functions.items()}
    # Freeze the objects built so far; otherwise a garbage collection would visit all of them in the middle of a step.
    gc.collect()
    gc.freeze()
    threading.Thread(target=sockets.read_into, args=(core,), name="reader", daemon=True).start()
    sleep.restore_sleep_state(core.functions, sleep_file)
    status.send(ready)
    watchdog.send_by(status.send)
    if resolved.executor != "uni":
        watch_workers(core)
    try:
        loop(core, sockets, watchdog)
    finally:
        core.close()
        sockets.close()


def main(folder: Path, frontends: int, status_fd: int, parent: int) -> int:
    signal.signal(STOP, stop)
    begin_child("engine", parent)
    status = StatusWriter(status_fd)
    try:
        serve(folder, frontends, status)
    except StopEngine:
        return 0
    except QuireError as error:
        status.send(EngineDied(str(error)))
        return 1
    except BaseException as error:
        status.send(EngineDied(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


if __name__ == "__main__":
    parent_folder, epoch, count, status, parent = sys.argv[1:]
    exit_child(main(Path(parent_folder) / epoch, int(count), int(status), int(parent)))
