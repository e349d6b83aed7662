"""EngineSupervisor: keeps one engine's process alive, and tells the front rooms how it stands.

Knows a child process, its lifeline, a folder and how often it may begin again. Does not know requests. What the
front rooms must know stands on a board in memory (`shared_state.py`); the sockets of the n-th process lie in FOLDER/n, so
that nothing of an earlier life can reach a later one.

    starting -> ready -> restarting -> ready ...     closed: it was told to stop
       |                `-> delayed -> restarting    after too many deaths: a try every `RestartPolicy.retry` seconds
       `-> dead                                      the first start failed, or the host itself did
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire import env
from quire.config.recording import for_recording
from quire.engine import flight_recorder
from quire.engine.quarantine import Suspects, digest_of_entered
from quire.engine.run_folder import hold, own_folder, remove_stale
from quire.engine.shared_state import EngineState, StateBoard
from quire.engine.status_pipe import STOP, StatusReader
from quire.logging import get_logger
from quire.protocol.output import EngineDied, EngineReady, Heartbeat

log = get_logger(__name__)

CONFIG = "resolved"
ASLEEP_S = 2.0  # a look takes a tenth of that
KILLED_S = 10.0  # a killed process has ended by then, unless a device or a disk holds it


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What counts as dead, and how often a dead engine is replaced."""

    heartbeat: float = 8.0  # seconds without a sign of life; 0: never mind
    start: float = 600.0  # seconds until the model must be loaded
    restarts: int = 3  # at once, within `window`; 0: a dead engine is not replaced
    window: float = 600.0
    retry: float = 30.0  # seconds between two starts beyond `restarts`


class EngineSupervisor:
    """Owns the folder and the child.

    Args:
        payload: what the child reads on its stdin: a resolved configuration (`config/serialize.py`).
        frontends: how many front rooms there will be.

    Raises:
        StartupError: there is no directory for the sockets.
    """

    def __init__(self, payload: bytes, frontends: int = 1, patience: RestartPolicy | None = None):
        self.folder = own_folder()
        self._lock = hold(self.folder)
        remove_stale(self.folder.parent)
        (self.folder / "1").mkdir()
        self.patience = patience or RestartPolicy()
        self._payload, self._frontends = payload, frontends
        self._closing = threading.Event()
        self._deaths: deque[float] = deque()
        self.child: subprocess.Popen[bytes] | None = None
        self.board = StateBoard()
        self._suspects = Suspects()
        self._thread = threading.Thread(target=self._keep, name="engine-host", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """How the engine stands. It is dead as well when the thread that keeps it has ended by itself."""
        state = self.board.now
        if state.condition in ("dead", "closed") or self._thread.is_alive():
            return state
        if (state := self.board.now).condition not in ("dead", "closed"):
            log.error("the thread that keeps the engine has ended")
            self._change(condition="dead", error="the thread that keeps the engine has ended")
        return self.board.now

    def close(self, patience: float = 5.0) -> None:
        """Stop the child: asked, then told, then killed."""
        self._closing.set()
        self._thread.join(patience + 2.0)
        if self.board.now.condition != "dead":
            self._change(condition="closed")
        self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    # -- the thread -----------------------------------------------------------------------------
    def _keep(self) -> None:
        try:
            while self._live_once():
                pass
        except Exception as error:
            log.exception("the engine's host failed")
            self._change(condition="dead", error=f"{type(error).__name__}: {error}")

    def _change(self, **changes: Any) -> None:
        self.board.publish(msgspec.structs.replace(self.board.now, **changes))

    def _live_once(self) -> bool:
        """One child from its start to its end; whether there will be another."""
        generation = self.board.now.generation
        place = self.folder / str(generation) / CONFIG
        try:  # a recording is of use with it only
            place.write_bytes(for_recording(self._payload))
        except Exception as why:  # it costs the recording, and not the engine
            log.warning(
                "the configuration could not be written beside the flight recording: %s", why
            )
        try:
            child, listener = self._start(generation)
        except OSError as why:  # no processes or descriptors are left: others may give some back
            return self._after(EngineDied(f"the engine's process could not be started: {why}"))
        try:
            died = self._watch(child, listener)
        finally:
            listener.close()
            end_process(child, 5.0)
        if died is None:
            self.board.publish(EngineState(generation, "closed"))
            return False
        return self._after(died)

    def _start(self, generation: int) -> tuple[subprocess.Popen[bytes], StatusReader]:
        reading, writing = os.pipe()
        try:
            self.child = child = self._spawn(generation, writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return child, StatusReader(reading)

    def _spawn(self, generation: int, lifeline: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "quire.engine.engine_process",
            str(self.folder), str(generation), str(self._frontends), str(lifeline), str(os.getpid()),
        ]  # fmt: skip
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[lifeline], env=env.for_a_child()
        )
        if child.stdin is not None:
            try:
                child.stdin.write(self._payload)
                child.stdin.close()
            except BrokenPipeError:
                pass  # it is dead already; its lifeline says so
        return child

    def _watch(self, child: subprocess.Popen[bytes], listener: StatusReader) -> EngineDied | None:
        """Listen until the child is to be given up: why; None: it was us who wanted to stop."""
        clock, patience = time.monotonic, self.patience
        began = heard = looked = clock()
        ready, last_words = False, None
        while not self._closing.is_set():
            if (
                clock() - looked > ASLEEP_S
            ):  # we were stopped ourselves (a frozen container, a closed lid)
                heard = clock()
            looked = clock()
            for message in listener.poll(0.2):
                heard = clock()
                match message:
                    case EngineReady():
                        ready = True
                        self._change(condition="ready", ready=message, error="", traceback="")
                    case EngineDied():
                        last_words = message
                    case Heartbeat() if ready and message.busy > message.allowed:
                        why = (
                            f"a step, or a function of the engine, has taken {message.busy:.0f} s, and"
                            f" {message.allowed:.0f} s is what it may take (a step: at this machine's pace)"
                        )
                        return self._hung(child, why)
            if listener.broken:
                code = exit_code(child)
                return last_words or EngineDied(f"the engine process ended {code}")
            if ready and 0 < patience.heartbeat < clock() - heard:
                return self._hung(child, f"no sign of life for {patience.heartbeat:.0f} s")
            if not ready and clock() - began > patience.start:
                return self._hung(child, f"the model was not loaded after {patience.start:.0f} s")
        return None

    def _hung(self, child: subprocess.Popen[bytes], why: str) -> EngineDied:
        """Have both processes write their stacks, then kill the child."""
        log.error("the engine hangs: %s; the stacks of both processes follow", why)
        log.error("%s", own_stacks())
        with contextlib.suppress(OSError):
            child.send_signal(signal.SIGUSR1)  # engine/engine_process.py answers with its stacks
        time.sleep(1.0)
        child.kill()
        return EngineDied(f"the engine hung: {why}")

    def _after(self, died: EngineDied) -> bool:
        """Say what was lost; begin again, at once or later."""
        state, now = self.board.now, time.monotonic()
        if state.condition == "starting":  # whoever waits for the start reports it
            self._change(condition="dead", error=died.error, traceback=died.traceback)
            return False
        recording = self._recording()
        running = [] if recording is None else recording.running()
        self._suspects.ran(digest_of_entered(row) for row in running)
        self._deaths.append(now)
        while now - self._deaths[0] > self.patience.window:
            self._deaths.popleft()
        incident, count = secrets.token_hex(4), len(self._deaths)
        is_over, is_late = self.patience.restarts == 0, count > self.patience.restarts
        what = "it is started again"
        if is_over or is_late:
            after = (
                "not started again" if is_over else f"started again in {self.patience.retry:.0f} s"
            )
            what = f"and {count} times in a row: it is {after}"
        log.error("failure %s: %s; %s\n%s", incident, died.error, what, died.traceback)
        new = EngineState(
            state.generation, "dead" if is_over else "delayed", error=died.error, traceback=died.traceback,
            lost=[] if recording is None else sorted(recording.seen()), recorded=recording is not None,
            poison=self._suspects.poison(), incident=incident,
        )  # fmt: skip
        if is_over:
            new.error += f" ({what})"
        if is_over or is_late:
            self.board.publish(new)
        return not is_over and self._succeed(new, self.patience.retry if is_late else 0.0)

    def _succeed(self, state: EngineState, wait: float) -> bool:
        """Make room for the next process and say so, after `wait` seconds; False: it is time to stop."""
        while not self._closing.wait(wait):
            try:
                self._make_place(state.generation + 1)
            except OSError as why:
                log.error("there is no room for the next engine's sockets: %s", why)
                self.board.publish(msgspec.structs.replace(state, condition="delayed"))
                wait = self.patience.retry
                continue
            self.board.publish(msgspec.structs.replace(
                state, generation=state.generation + 1, condition="restarting"
            ))  # fmt: skip
            return True
        self._change(condition="closed")
        return False

    def _make_place(self, generation: int) -> None:
        """The folder of the next process's sockets. Something may have deleted ours: a cleaner of old files."""
        if not self.folder.exists():
            log.warning("%s was deleted; it is made again", self.folder)
            self.folder.mkdir(mode=0o700)
        shutil.rmtree(self.folder / str(generation - 1), ignore_errors=True)
        (self.folder / str(generation)).mkdir(exist_ok=True)

    def _recording(self) -> flight_recorder.Recording | None:
        """What the dead engine did last; kept for `quire replay`."""
        folder = self.folder / str(self.board.now.generation)
        try:
            recording = flight_recorder.read_recording(folder)
        except Exception:  # whatever its last steps left there
            log.exception("the flight recording could not be read")
            return None
        if recording is not None:
            try:
                log.error(
                    "the last steps are in %s: quire replay shows them", keep_recording(folder)
                )
            except OSError as why:
                log.warning("the flight recording could not be kept: %s", why)
        return recording


def keep_recording(folder: Path) -> Path:
    """Copy a recording to where it outlives us; the five latest are kept."""
    root = Path(str(env.get("CACHE_ROOT"))).expanduser() / "crashes"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = root / f"{int(time.time())}-{os.getpid()}-{folder.name}"
    target.mkdir(mode=0o700)
    for path in (folder / CONFIG, *folder.glob("flight-*")):
        shutil.copy(path, target)
    for old in sorted(path for path in root.iterdir() if path.is_dir())[:-5]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def own_stacks() -> str:
    """The stacks of all threads of this process. Not straight to the terminal: that may block, and all threads with it."""
    with (
        contextlib.suppress(OSError, AttributeError),
        os.fdopen(os.memfd_create("stacks"), "w+b") as file,
    ):
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return "(the stacks of this process could not be read)"


def exit_code(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(2.0)
    except subprocess.TimeoutExpired:
        return "its lifeline, but not itself"
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"


def end_process(child: subprocess.Popen[bytes], patience: float) -> None:
    """Stop a child that may be alive: asked, then killed."""
    if child.poll() is None:
        child.send_signal(STOP)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # stuck in the kernel: it ends some day
                child.wait(KILLED_S)
