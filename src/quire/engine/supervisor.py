"""EngineSupervisor: keeps one engine's process alive, and publishes the engine's state to the frontends.

Knows a child process, its status pipe, a folder and how often it may restart. Does not know requests. It publishes the
state on a board in shared memory (`engine_state.py`). The sockets of the n-th process are in FOLDER/n, so that no
message of an earlier process reaches a later one.

    starting -> ready -> restarting -> ready ...     closed: it was stopped
       |                `-> delayed -> restarting    after too many deaths: a try every `RestartPolicy.retry` seconds
       `-> dead                                      the first start failed, or the supervisor itself did
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from quire import env
from quire.config.recording import for_recording
from quire.engine import flight_recorder
from quire.engine.engine_state import EngineState, StateBoard
from quire.engine.poison_requests import Suspects
from quire.logging import get_logger
from quire.processes.child import how_it_ended, own_stacks, start_child
from quire.processes.restart_policy import RestartCount, RestartPolicy
from quire.processes.run_folder import hold, own_folder, remove_stale
from quire.processes.supervisor import SupervisedProcess
from quire.protocol.output import EngineDied, EngineReady, Heartbeat, StartupStatus

log = get_logger(__name__)

CONFIG = "resolved"
LOOK_EVERY_S = 0.2
STOP_S = 5.0  # for the child to end by itself


class EngineSupervisor:
    """Owns the folder and the child.

    Args:
        payload: what the child reads from stdin: a resolved configuration (`config/serialize.py`).
        frontends: how many frontends there will be.
        suspects: which requests ran when engines died; several supervisors share it.
        name: of the engine in the log, if there are several.

    Raises:
        StartupError: no directory for the sockets.
    """

    def __init__(
        self,
        payload: bytes,
        frontends: int = 1,
        policy: RestartPolicy | None = None,
        suspects: Suspects | None = None,
        name: str = "the engine",
    ):
        self.name = name
        self.folder = own_folder()
        self._lock = hold(self.folder)
        remove_stale(self.folder.parent)
        (self.folder / "1").mkdir()
        self.policy = policy or RestartPolicy()
        self._restarts = RestartCount(self.policy)
        self._payload, self._frontends = payload, frontends
        self._closing = threading.Event()
        self.child: SupervisedProcess | None = None
        self.board = StateBoard()
        self._suspects = Suspects() if suspects is None else suspects
        self._thread = threading.Thread(
            target=self._supervise, name="engine-supervisor", daemon=True
        )
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """The state of the engine. It is dead too if the supervisor's thread has ended unexpectedly."""
        state = self.board.latest
        if state.condition in ("dead", "closed") or self._thread.is_alive():
            return state
        if (state := self.board.latest).condition not in ("dead", "closed"):
            reason = f"the thread that supervises {self.name} has ended"
            log.error(reason)
            self._change(condition="dead", error=reason)
        return self.board.latest

    def stop(self) -> None:
        """Order the child to end; `close` waits for that."""
        self._closing.set()

    def close(self, seconds: float = 5.0) -> None:
        """Stop the child; kill it if it does not end."""
        self.stop()
        self._thread.join(seconds + 2.0)
        if self.board.latest.condition != "dead":
            self._change(condition="closed")
        self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    # -- the thread -----------------------------------------------------------------------------
    def _supervise(self) -> None:
        try:
            while self._run_once():
                pass
        except Exception as error:
            log.exception("the supervisor of %s failed", self.name)
            self._change(condition="dead", error=f"{type(error).__name__}: {error}")

    def _change(self, **changes: Any) -> None:
        self.board.publish(msgspec.structs.replace(self.board.latest, **changes))

    def _run_once(self) -> bool:
        """Run one child from its start to its end. Returns whether to start another."""
        epoch = self.board.latest.epoch
        self._write_configuration(self.folder / str(epoch) / CONFIG)
        try:
            self.child = child = SupervisedProcess(partial(self._spawn, epoch))
        except OSError as why:  # no processes or descriptors are free; others may free some
            return self._after(EngineDied(f"could not start the engine process: {why}"))
        try:
            died = self._watch(child)
        finally:
            child.end(STOP_S)
        if died is None:
            self.board.publish(EngineState(epoch, "closed"))
            return False
        return self._after(died)

    def _write_configuration(self, path: Path) -> None:
        """A flight recording is only useful with it."""
        try:
            path.write_bytes(for_recording(self._payload))
        except Exception as why:  # only the recording is lost, not the engine
            log.warning(
                "could not write the configuration to the flight recorder's folder: %s", why
            )

    def _spawn(self, epoch: int, status_fd: int) -> subprocess.Popen[bytes]:
        args = self.folder, epoch, self._frontends, status_fd, os.getpid()
        return start_child("quire.engine.engine_main", args, self._payload, [status_fd])

    def _watch(self, child: SupervisedProcess) -> EngineDied | None:
        """Monitor the child until it has died or hangs, and return why; None: this supervisor was closed."""
        policy, started = self.policy, time.monotonic()
        ready, last_message = False, None
        while not self._closing.is_set():
            for message in child.poll(LOOK_EVERY_S):
                match message:
                    case EngineReady():
                        ready = True
                        self._change(condition="ready", ready=message, error="", traceback="")
                    case StartupStatus():
                        self._change(startup=message)
                    case EngineDied():
                        last_message = message
                    case Heartbeat() if ready and message.busy > message.allowed:
                        reason = (
                            f"a step or an engine function has taken {message.busy:.0f} s, and"
                            f" {message.allowed:.0f} s is what it may take (a step: at this machine's pace)"
                        )
                        return self._hung(child, reason)
            if child.status.broken:
                how = how_it_ended(child.process)
                return last_message or EngineDied(f"the engine process {how}")
            if ready and child.is_silent(policy.heartbeat):
                return self._hung(child, f"no heartbeat for {policy.heartbeat:.0f} s")
            if not ready and time.monotonic() - started > policy.start:
                return self._hung(child, f"the model was not loaded after {policy.start:.0f} s")
        return None

    def _hung(self, child: SupervisedProcess, why: str) -> EngineDied:
        """Make both processes write their stacks to the log, then kill the child."""
        log.error("%s hangs: %s; stacks of both processes follow", self.name, why)
        log.error("%s", own_stacks())
        child.kill_hanging()
        return EngineDied(f"the engine hung: {why}")

    def _after(self, died: EngineDied) -> bool:
        """Publish what was lost. Returns whether to start the engine again, at once or after a delay."""
        state = self.board.latest
        if state.condition == "starting":  # the caller that waits for the start reports it
            self._change(condition="dead", error=died.error, traceback=died.traceback)
            return False
        recording = self._recording()
        lengths = {} if recording is None else recording.lengths()
        blamed = [] if recording is None else self._suspects.died(recording.running(), lengths)
        incident, restart = secrets.token_hex(4), self._restarts.after_death()
        about = f"failure {incident} of {self.name}"
        log.error("%s: %s; %s\n%s", about, died.error, restart.text, died.traceback)
        state_after = EngineState(
            state.epoch, "dead" if restart.delay is None else "delayed", error=died.error, traceback=died.traceback,
            lost=lengths, blamed=blamed, recorded=recording is not None or state.condition == "restarting",
            poison=self._suspects.poison(), incident=incident,
        )  # fmt: skip
        if restart.delay is None:
            state_after.error += f" ({restart.text})"
            self.board.publish(state_after)
            return False
        if restart.delay:
            self.board.publish(state_after)
        return self._start_next(state_after, restart.delay)

    def _start_next(self, state: EngineState, wait: float) -> bool:
        """Create the next process's folder and publish that, after `wait` seconds; False: the supervisor was closed."""
        while not self._closing.wait(wait):
            try:
                self._make_folder(state.epoch + 1)
            except OSError as why:
                log.error("no folder for the sockets of the next process of %s: %s", self.name, why)
                self.board.publish(msgspec.structs.replace(state, condition="delayed"))
                wait = self.policy.retry
                continue
            self.board.publish(
                msgspec.structs.replace(state, epoch=state.epoch + 1, condition="restarting")
            )
            return True
        self._change(condition="closed")
        return False

    def _make_folder(self, epoch: int) -> None:
        """Create the folder for the next process's sockets. A cleaner of old files may have deleted its parent."""
        if not self.folder.exists():
            log.warning("%s was deleted; creating it again", self.folder)
            self.folder.mkdir(mode=0o700)
        shutil.rmtree(self.folder / str(epoch - 1), ignore_errors=True)
        (self.folder / str(epoch)).mkdir(exist_ok=True)

    def _recording(self) -> flight_recorder.Recording | None:
        """What the dead engine did last; also kept for `quire replay`."""
        folder = self.folder / str(self.board.latest.epoch)
        try:
            recording = flight_recorder.read_recording(folder)
        except Exception:  # its last steps may have left anything there
            log.exception("the flight recording of %s could not be read", self.name)
            return None
        if recording is not None:
            try:
                log.error(
                    "the last steps of %s are recorded in %s: see quire replay",
                    self.name,
                    keep_recording(folder),
                )
            except OSError as why:
                log.warning("could not keep the flight recording: %s", why)
        return recording


def keep_recording(folder: Path) -> Path:
    """Copy a recording to a folder that outlives this process; the five latest are kept."""
    root = Path(str(env.get("CACHE_ROOT"))).expanduser() / "crashes"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = root / f"{int(time.time())}-{os.getpid()}-{folder.name}"
    target.mkdir(mode=0o700)
    for path in (folder / CONFIG, *folder.glob("flight-*")):
        shutil.copy(path, target)
    for old in sorted(path for path in root.iterdir() if path.is_dir())[:-5]:
        shutil.rmtree(old, ignore_errors=True)
    return target
