"""Supervises several HTTP processes over one engine; signals from outside come to this process.

    this process           binds, supervises the engine (engine/supervisor.py) and the HTTP processes, logs statistics
    HTTP process 0 .. N-1  accepts from its own queue at the same address, and talks to the engine directly

It restarts an HTTP process that dies or hangs, at once or, after too many deaths, later. It aborts that process's
requests in the engine; new connections wait in the process's queue. Knows processes, signals and status pipes. Does
not know HTTP, and imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from socket import socket
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from quire import env
from quire.config.engine import EngineConfig
from quire.config.serialize import resolved_to_bytes
from quire.engine.engine_launcher import connect, restart_policy, supervise
from quire.engine.resolve import resolve_config
from quire.errors import EngineDeadError, QuireError, StartupError
from quire.frontend.startup import check_startup
from quire.logging import get_logger
from quire.observe.stats_log import StatsLog
from quire.processes.child import STOP, how_it_ended, start_child
from quire.processes.restart_policy import RestartCount
from quire.processes.supervisor import SupervisedProcess
from quire.protocol.output import EngineDied, EngineOpen
from quire.server.process.banner import failure, greet
from quire.server.process.http_worker import KEYS, MODULE
from quire.server.process.server_process import (
    ABORTED_S,
    DEATH_NOTICE_S,
    closes_with_terminal,
    stats_logs,
)
from quire.server.process.sockets import LAST_ANSWERS_S, address, bind_beside
from quire.server.shared_usage import forget
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
    restarts: RestartCount
    process: SupervisedProcess | None = None
    is_open: bool = False
    died: EngineDied | None = None
    """Its last message, or this process's report of its death."""
    is_given_up: bool = False
    """It is not started again."""
    start_at: float = 0.0
    """When it may be started again."""
    cleanup: threading.Thread | None = None
    """Aborts the previous process's requests in the engine; there is no new process until this is done."""


class HttpSupervisor:
    """Starts, watches and restarts the HTTP processes."""

    def __init__(self, config: EngineConfig, listeners: list[socket]):
        self.config, self.listeners = config, listeners
        self.url = address(config.server, listeners[0])
        self.family, self.name = listeners[0].family, listeners[0].getsockname()
        self.count = len(listeners)
        resolved = resolve_config(config, check_startup)
        self.payload, self.policy = resolved_to_bytes(resolved), restart_policy()
        # This process is the last of the engines' frontends.
        self.engines = supervise(resolved, self.count + 1)
        self.folder = folder = self.engines[0].folder
        self.metrics_folder, self.usage_folder = folder / "metrics", folder / KEYS
        self.metrics_folder.mkdir()
        self.usage_folder.mkdir()
        self.client = connect(resolved, self.engines, self.count, self.count)
        self.logs: list[StatsLog] = []
        """Not empty: the server is ready."""
        self.ticked = 0.0
        self.children = [
            HttpWorkerSlot(number, own, RestartCount(self.policy))
            for number, own in enumerate(listeners)
        ]
        self.chats = False
        self.stop_at: float | None = None  # time of the first stop signal
        self.engine_died_at: float | None = None

    def run(self) -> int:
        """Run to the end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        if self.config.server.api_key_file is not None:
            signal.signal(signal.SIGHUP, self._reload)
        elif closes_with_terminal():
            signal.signal(signal.SIGHUP, self._stop)
        threading.Thread(target=self._read_stats, name="engine-stats", daemon=True).start()
        try:
            for child in self.children:
                self._start(child)
            while (code := self._turn()) is None:
                pass
            return code
        finally:
            for child in self.children:
                if child.process is not None:
                    child.process.end(LAST_ANSWERS_S)
            self.client.close()

    # -- signals --------------------------------------------------------------------------------
    def _stop(self, number: int, frame: FrameType | None) -> None:
        """The first signal drains the server, the second one ends it."""
        if self.stop_at is None:
            log.info("%s: shutting down", signal.Signals(number).name)
            self.stop_at = time.monotonic()
        self._signal_all(STOP)

    def _reload(self, number: int, frame: FrameType | None) -> None:
        self._signal_all(signal.SIGHUP)

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(number)

    # -- one turn -------------------------------------------------------------------------------
    def _turn(self) -> int | None:
        """Read status messages and check each process; the exit status at the end, else None."""
        self._read_status()
        for child in self.children:
            self._check(child)
        state = self.client.state()
        if self.stop_at is not None:
            return self._stopped(self.stop_at)
        if not self.logs:
            if state.condition == "dead":
                return self._failed(StartupError(state.error, state.traceback))
            for child in self.children:
                if child.process is None and child.died is not None:
                    return self._failed(StartupError(child.died.error, child.died.traceback))
            if state.condition == "ready" and all(child.is_open for child in self.children):
                self._greet()
        elif state.condition == "dead":
            return self._engine_died(state.error)
        elif not any(c.process or c.cleanup or not c.is_given_up for c in self.children):
            log.error("no HTTP process is left")
            return 1
        self._tick()
        return None

    def _read_status(self) -> None:
        pipes = [
            child.process.status.fileno()
            for child in self.children
            if child.process is not None and not child.process.status.broken
        ]
        wait(pipes, LOOK_EVERY_S)
        for child in self.children:
            if child.process is not None:
                self._read_messages(child, child.process)

    def _read_messages(self, child: HttpWorkerSlot, process: SupervisedProcess) -> None:
        for message in process.poll(0):
            match message:
                case EngineOpen(chats=chats):
                    child.is_open, self.chats = True, chats
                    if self.logs:
                        log.info("HTTP process %d is ready again", child.number)
                case EngineDied():
                    child.died = message

    def _check(self, child: HttpWorkerSlot) -> None:
        process = child.process
        if process is None:
            if child.cleanup is not None and not child.cleanup.is_alive():
                child.cleanup = None
            ends = self.stop_at is not None or self.engine_died_at is not None
            is_due = child.cleanup is None and time.monotonic() >= child.start_at
            if self.logs and not child.is_given_up and not ends and is_due:
                self._start(child, again=True)
        elif process.has_ended:
            self._ended(child, process)
        elif child.is_open and process.is_silent(self.policy.heartbeat):
            log.error(
                "HTTP process %d sent no heartbeat for %g s; its stacks follow",
                child.number,
                self.policy.heartbeat,
            )
            process.kill_hanging()

    # -- start and restart ----------------------------------------------------------------------
    def _start(self, child: HttpWorkerSlot, again: bool = False) -> None:
        try:
            if child.listener is None:
                child.listener = bind_beside(self.family, self.name)
            spawn = partial(self._spawn, child.number, child.listener.fileno(), again)
            child.process = process = SupervisedProcess(spawn)
        except OSError as why:
            log.error("HTTP process %d cannot be started: %s", child.number, why)
            child.start_at = time.monotonic() + self.policy.retry
            return
        child.is_open, child.died = False, None
        if self.stop_at is not None:  # the stop signal came during its start
            process.send_signal(STOP)

    def _spawn(
        self, number: int, listener: int, again: bool, status_fd: int
    ) -> subprocess.Popen[bytes]:
        boards = [place.board.fd for place in self.engines]
        folders = [place.folder for place in self.engines]
        args = (number, self.count, listener, status_fd, os.getpid(), int(again), *boards, *folders)
        environment = env.for_a_child(PROMETHEUS_MULTIPROC_DIR=str(self.metrics_folder))
        return start_child(MODULE, args, self.payload, [listener, status_fd, *boards], environment)

    def _ended(self, child: HttpWorkerSlot, process: SupervisedProcess) -> None:
        """Restart the process, if that is allowed and the server is not stopping."""
        self._read_messages(child, process)  # its last one
        process.status.close()
        child.process, child.is_open = None, False
        try:
            mark_process_dead(process.pid, str(self.metrics_folder))  # type: ignore[no-untyped-call]
            forget(self.usage_folder, child.number, self.count)
        except OSError as why:
            log.warning(
                "the shared counts of HTTP process %d could not be corrected: %s", child.number, why
            )
        if self.stop_at is not None or self.client.state().condition == "dead":
            child.is_given_up = True
            self._close_listener(child)
            return
        what = f"HTTP process {child.number} (pid {process.pid}) {how_it_ended(process.process)}"
        if not self.logs:
            child.died = child.died or EngineDied(
                f"{what} before it was ready; its log lines above give the reason"
            )
            return
        restart = child.restarts.after_death()
        child.is_given_up = restart.delay is None
        if restart.delay is not None:
            child.start_at = time.monotonic() + restart.delay
        others_serve = any(other.is_open for other in self.children)
        if child.is_given_up or (restart.delay and others_serve):
            self._close_listener(child)  # new connections go to the others
        log.error("%s; %s", what, restart.text)
        child.cleanup = threading.Thread(target=self._clean_up, args=(child.number,), daemon=True)
        child.cleanup.start()

    def _clean_up(self, number: int) -> None:
        """Release what the dead process had in the engine. In a thread, since the engine's answer may take as long as a step."""
        time.sleep(SETTLE_S)
        try:
            if count := self.client.call("abort_client", number):
                log.info("aborted %d requests of HTTP process %d", count, number)
            self.client.call("release_client", number)
        except QuireError as error:
            log.warning("could not abort the requests of HTTP process %d: %s", number, error)

    def _close_listener(self, child: HttpWorkerSlot) -> None:
        """Close its queue: no connection waits for this process any more."""
        if child.listener is not None and self.config.server.uds is None:
            child.listener.close()
            child.listener = None

    # -- the ends -------------------------------------------------------------------------------
    def _failed(self, error: StartupError) -> int:
        show(failure(error), sys.stderr)
        return 1

    def _stopped(self, since: float) -> int | None:
        """The exit status, once all processes have ended or should have; else None."""
        if not any(child.process for child in self.children):
            return 0
        limit_s = self.config.server.shutdown_timeout + ABORTED_S + LAST_ANSWERS_S + GRACE_S
        if time.monotonic() - since < limit_s:
            return None
        log.error("HTTP processes did not exit; killing them")
        for child in self.children:
            if child.process is not None:
                child.process.process.kill()
        return 0

    def _engine_died(self, why: str) -> int | None:
        """The HTTP processes tell their clients, and end by themselves."""
        now = time.monotonic()
        if self.engine_died_at is None:
            self.engine_died_at = now
            log.error("the engine has stopped: %s", why)
        if env.get("KEEP_ALIVE_ON_ENGINE_DEATH"):
            return None
        left = any(child.process for child in self.children)
        seconds = DEATH_NOTICE_S + LAST_ANSWERS_S + GRACE_S
        return None if left and now - self.engine_died_at < seconds else 1

    # -- output to the terminal -----------------------------------------------------------------
    def _greet(self) -> None:
        greet(self.config, self.client.wait_ready(), self.url, self.chats, self.count)
        self.logs = stats_logs(self.client)
        self.ticked = time.monotonic()

    def _tick(self) -> None:
        every, now = self.config.observe.log_stats_interval, time.monotonic()
        if self.logs and every and now - self.ticked >= every:
            for stats in self.logs:
                stats.tick(now - self.ticked, write=not self.config.observe.disable_log_stats)
            self.ticked = now

    def _read_stats(self) -> None:
        """Receives the engine's statistics. This process sends the engine nothing but `call`s."""
        try:
            while True:
                self.client.outputs()
        except EngineDeadError:
            return


def serve_many(config: EngineConfig, listeners: list[socket]) -> int:
    """As `launch.serve`, with a process for each listener."""
    return HttpSupervisor(config, listeners).run()
