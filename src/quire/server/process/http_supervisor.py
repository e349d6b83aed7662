"""Supervises several HTTP processes over one engine; signals from outside come to this process.

    this process           binds, supervises the engine (engine/supervisor.py) and the HTTP processes, logs statistics
    HTTP process 0 .. N-1  accepts from its own queue at the same address, and talks to the engine directly

It restarts an HTTP process that dies or hangs, at once or, after too many deaths, later. It aborts that process's
requests in the engine; new connections wait in the process's queue. Knows processes, signals and status pipes. Does
not know HTTP, and imports no torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from socket import socket
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from quire import env
from quire.config.engine import EngineConfig
from quire.config.serialize import resolved_to_bytes
from quire.engine.build import patience, resolve_config
from quire.engine.process_client import ProcessClient
from quire.engine.supervisor import EngineSupervisor
from quire.errors import EngineDeadError, QuireError, StartupError
from quire.logging import get_logger
from quire.observe.stats_log import StatsLog
from quire.processes.child import STACKS, STOP, end_child, how_it_ended, start_child
from quire.processes.status_pipe import StatusReader
from quire.processes.watchdog import SUSPENDED_S
from quire.protocol.output import EngineDied, EngineOpen
from quire.server.process.banner import curl_line, facts_table, failure, stages_table
from quire.server.process.http_worker import KEYS, MODULE
from quire.server.process.launch import ABORTED_S, DEATH_TOLD_S, closes_with_terminal, model_names
from quire.server.process.sockets import LAST_ANSWERS_S, address, bind_beside
from quire.server.shared_usage import forget
from quire.startup_timer import since_process_start
from quire.terminal import show

log = get_logger(__name__)

LOOK_EVERY_S = 0.2
SETTLE_S = 0.3  # until the messages of a dead process have reached the engine
GRACE_S = 5.0  # after all the time that a process has to end by itself


@dataclass(slots=True, eq=False)
class HttpWorkerSlot:
    """The place of an HTTP process and of those that replace it."""

    number: int
    listener: socket | None
    process: subprocess.Popen[bytes] | None = None
    ear: StatusReader | None = None
    heard: float = 0.0
    is_open: bool = False
    died: EngineDied | None = None
    """Its last message, or this process's report of its death."""
    deaths: deque[float] = field(default_factory=deque)
    is_over: bool = False
    """It is not restarted."""
    due: float = 0.0
    """When it may be restarted."""
    disowning: threading.Thread | None = None
    """Aborts the previous process's requests in the engine; there is no new process until this is done."""


class HttpSupervisor:
    """Starts, watches and restarts the HTTP processes."""

    def __init__(self, config: EngineConfig, listeners: list[socket]):
        self.config, self.listeners = config, listeners
        self.url = address(config.server, listeners[0])
        self.family, self.name = listeners[0].family, listeners[0].getsockname()
        self.count = len(listeners)
        resolved = resolve_config(config)
        self.payload, self.patience = resolved_to_bytes(resolved), patience()
        # This process is the last of the engine's frontends.
        self.host = EngineSupervisor(self.payload, self.count + 1, self.patience)
        self.counted = self.host.folder / "metrics"
        self.keys = self.host.folder / KEYS
        self.counted.mkdir()
        self.keys.mkdir()
        self.client = ProcessClient(
            resolved, self.host.folder, self.host.board, self.host, self.count
        )
        self.stats: StatsLog | None = None
        self.ticked = 0.0
        self.looked = time.monotonic()
        self.children = [HttpWorkerSlot(number, own) for number, own in enumerate(listeners)]
        self.chats = False
        self.told: float | None = None  # time of the first stop signal
        self.engine_died: float | None = None

    def run(self) -> int:
        """Run to the end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        if self.config.server.api_key_file is not None:
            signal.signal(signal.SIGHUP, self._reload)
        elif closes_with_terminal():
            signal.signal(signal.SIGHUP, self._stop)
        threading.Thread(target=self._take_in, name="engine-stats", daemon=True).start()
        try:
            for child in self.children:
                self._start(child)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            for child in self.children:
                if child.process is not None:
                    end_child(child.process, LAST_ANSWERS_S)
            self.client.close()

    # -- signals --------------------------------------------------------------------------------
    def _stop(self, number: int, frame: FrameType | None) -> None:
        """The first signal drains the server, the second one ends it."""
        if self.told is None:
            log.info("%s: shutting down", signal.Signals(number).name)
            self.told = time.monotonic()
        self._tell(STOP)

    def _reload(self, number: int, frame: FrameType | None) -> None:
        self._tell(signal.SIGHUP)

    def _tell(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)

    # -- one turn -------------------------------------------------------------------------------
    def _turn(self) -> int | None:
        """Read status messages and check each process; the exit status at the end, else None."""
        now = time.monotonic()
        if (
            now - self.looked > SUSPENDED_S
        ):  # this process was suspended, and perhaps its children too
            for child in self.children:
                child.heard = now
        self.looked = now
        self._hear()
        for child in self.children:
            self._look_after(child)
        state = self.host.state
        if self.told is not None:
            return self._stopped(self.told)
        if self.stats is None:
            if state.condition == "dead":
                return self._failed(StartupError(state.error, state.traceback))
            for child in self.children:
                if child.process is None and child.died is not None:
                    return self._failed(StartupError(child.died.error, child.died.traceback))
            if state.ready is not None and all(child.is_open for child in self.children):
                self._greet()
        elif state.condition == "dead":
            return self._engine_died(state.error)
        elif not any(c.process or c.disowning or not c.is_over for c in self.children):
            log.error("no HTTP process is left")
            return 1
        self._tick()
        return None

    def _hear(self) -> None:
        ears = {child.ear: child for child in self.children if child.ear is not None}
        if not ears:
            time.sleep(LOOK_EVERY_S)
            return
        for ear in select.select(list(ears), [], [], LOOK_EVERY_S)[0]:
            child = ears[ear]
            child.heard = time.monotonic()
            for message in ear.poll(0):
                match message:
                    case EngineOpen(chats=chats):
                        child.is_open, self.chats = True, chats
                        if self.stats is not None:
                            log.info("HTTP process %d is ready again", child.number)
                    case EngineDied():
                        child.died = message
            if ear.broken:
                ear.close()
                child.ear = None

    def _look_after(self, child: HttpWorkerSlot) -> None:
        process = child.process
        if process is None:
            if child.disowning is not None and not child.disowning.is_alive():
                child.disowning = None
            has_end = self.told is not None or self.engine_died is not None
            is_due = child.disowning is None and time.monotonic() >= child.due
            if self.stats is not None and not child.is_over and not has_end and is_due:
                self._start(child, again=True)
        elif process.poll() is not None:
            self._ended(child, process)
        elif child.is_open and 0 < self.patience.heartbeat < time.monotonic() - child.heard:
            log.error(
                "HTTP process %d sent no heartbeat for %g s; its stacks follow",
                child.number, self.patience.heartbeat,
            )  # fmt: skip
            process.send_signal(STACKS)
            time.sleep(0.5)
            process.kill()
            process.wait()

    # -- start and restart ----------------------------------------------------------------------
    def _start(self, child: HttpWorkerSlot, again: bool = False) -> None:
        try:
            if child.listener is None:
                child.listener = bind_beside(self.family, self.name)
            reading, writing = os.pipe()
        except OSError as why:
            log.error("HTTP process %d cannot be started: %s", child.number, why)
            child.due = time.monotonic() + self.patience.retry
            return
        listener = child.listener.fileno()
        board = self.host.board.fd
        words = (self.host.folder, child.number, self.count, listener, writing, os.getpid(), int(again), board)  # fmt: skip
        environment = env.for_a_child(PROMETHEUS_MULTIPROC_DIR=str(self.counted))
        fds = [listener, writing, board]
        child.process = process = start_child(MODULE, words, self.payload, fds, environment)
        os.close(writing)
        child.ear, child.heard = StatusReader(reading), time.monotonic()
        child.is_open, child.died = False, None
        if self.told is not None:  # the stop signal came during its start
            process.send_signal(STOP)

    def _ended(self, child: HttpWorkerSlot, process: subprocess.Popen[bytes]) -> None:
        """Restart the process, if that is allowed and the server is not stopping."""
        child.process, child.is_open = None, False
        try:
            mark_process_dead(process.pid, str(self.counted))  # type: ignore[no-untyped-call]
            forget(self.keys, child.number, self.count)
        except OSError as why:
            log.warning(
                "the shared counts of HTTP process %d could not be corrected: %s", child.number, why
            )
        if self.told is not None or self.host.state.condition == "dead":
            child.is_over = True
            self._shut(child)
            return
        what = f"HTTP process {child.number} (pid {process.pid}) {how_it_ended(process)}"
        if self.stats is None:
            child.died = child.died or EngineDied(
                f"{what} before it was ready; its log lines above give the reason"
            )
            return
        now = time.monotonic()
        child.deaths.append(now)
        while now - child.deaths[0] > self.patience.window:
            child.deaths.popleft()
        count = len(child.deaths)
        if self.patience.restarts == 0:
            child.is_over = True
            self._shut(child)
            log.error("%s, %d times in a row; it is not restarted", what, count)
        elif count > self.patience.restarts:
            child.due = now + self.patience.retry
            if any(other.is_open for other in self.children):  # they accept connections meanwhile
                self._shut(child)
            log.error(
                "%s, %d times in a row; restarting it in %.0f s",
                what,
                count,
                self.patience.retry,
            )
        else:
            log.error("%s; restarting it", what)
        child.disowning = threading.Thread(target=self._disown, args=(child.number,), daemon=True)
        child.disowning.start()

    def _disown(self, number: int) -> None:
        """In a thread, since the engine's answer may take as long as a step."""
        time.sleep(SETTLE_S)
        try:
            if count := self.client.call("abort_client", number):
                log.info("aborted %d requests of HTTP process %d", count, number)
            self.client.call("let_go_client", number)
        except QuireError as error:
            log.warning("could not abort the requests of HTTP process %d: %s", number, error)

    def _shut(self, child: HttpWorkerSlot) -> None:
        """Close its queue: no connection waits for this process any more."""
        if child.listener is not None and self.config.server.uds is None:
            child.listener.close()
            child.listener = None

    # -- the ends -------------------------------------------------------------------------------
    def _failed(self, error: StartupError) -> int:
        show(failure(error), sys.stderr)
        return 1

    def _stopped(self, told: float) -> int | None:
        """The exit status, once all processes have ended or should have; else None."""
        if not any(child.process for child in self.children):
            return 0
        most = self.config.server.shutdown_timeout + ABORTED_S + LAST_ANSWERS_S + GRACE_S
        if time.monotonic() - told < most:
            return None
        log.error("HTTP processes did not exit; killing them")
        for child in self.children:
            if child.process is not None:
                child.process.kill()
        return 0

    def _engine_died(self, why: str) -> int | None:
        """The HTTP processes tell their clients, and end by themselves."""
        now = time.monotonic()
        if self.engine_died is None:
            self.engine_died = now
            log.error("the engine has stopped: %s", why)
        if env.get("KEEP_ALIVE_ON_ENGINE_DEATH"):
            return None
        left = any(child.process for child in self.children)
        patience_s = DEATH_TOLD_S + LAST_ANSWERS_S + GRACE_S
        return None if left and now - self.engine_died < patience_s else 1

    # -- output to the terminal -----------------------------------------------------------------
    def _greet(self) -> None:
        ready, names = self.client.wait_ready(), model_names(self.config)
        log.info("start-up\n%s", stages_table(ready.startup, since_process_start()))
        show(facts_table(self.config, ready, self.url, names))
        show(f"  HTTP          {self.count} processes")
        line = curl_line(self.config, self.url, names[0], self.chats)
        show(f"\nReady. Try:\n\n{line}\n")
        self.stats = StatsLog(self.client.stats, device=ready.device.upper())
        self.ticked = time.monotonic()

    def _tick(self) -> None:
        every, now = self.config.observe.log_stats_interval, time.monotonic()
        if self.stats is not None and every and now - self.ticked >= every:
            self.stats.tick(now - self.ticked, write=not self.config.observe.disable_log_stats)
            self.ticked = now

    def _take_in(self) -> None:
        """Receives the engine's statistics. This process sends the engine nothing but `call`s."""
        try:
            while True:
                self.client.outputs()
        except EngineDeadError:
            return


def serve_many(config: EngineConfig, listeners: list[socket]) -> int:
    """As `launch.serve`, with a process for each listener."""
    return HttpSupervisor(config, listeners).run()
