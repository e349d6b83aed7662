"""EngineHost: keeps one engine's process alive, and tells the front rooms how it stands.

Knows a child process, its lifeline, a folder and how often it may begin again. Does not know requests. What the
front rooms must know stands in one file, FOLDER/state, that is replaced as a whole; the sockets of the
n-th process lie in FOLDER/n, so that nothing of an earlier life can reach a later one.

    starting -> ready -> restarting -> ready ...     and at last dead (with the reason) or closed
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from quire import env
from quire.config.recording import for_recording
from quire.engine import flight
from quire.engine.lifeline import STOP, Listener
from quire.logging import get_logger
from quire.protocol.output import Beat, Died, Ready

log = get_logger(__name__)

CONFIG = "resolved"
ASLEEP_S = 2.0  # a look takes a tenth of that
Condition = Literal["starting", "ready", "restarting", "dead", "closed"]


class State(Struct):
    """How the engine stands."""

    generation: int
    condition: Condition
    ready: Ready | None = None
    error: str = ""
    traceback: str = ""
    lost: list[str] = []
    """Requests that the process before this one had begun: they cannot be had again."""


@dataclass(frozen=True, slots=True)
class Patience:
    """What counts as dead, and how often a dead engine is replaced."""

    heartbeat: float = 8.0  # seconds without a sign of life; 0: never mind
    start: float = 600.0  # seconds until the model must be loaded
    restarts: int = 3  # within `window`; beyond them the engine stays dead
    window: float = 600.0


class EngineHost:
    """Owns the folder and the child.

    Args:
        payload: what the child reads on its stdin: a resolved configuration (`config/wire.py`).
        frontends: how many front rooms there will be.
    """

    def __init__(self, payload: bytes, frontends: int = 1, patience: Patience | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="quire-"))
        self.patience = patience or Patience()
        self._payload, self._frontends = payload, frontends
        self._closing = threading.Event()
        self._deaths: deque[float] = deque()
        self.child: subprocess.Popen[bytes] | None = None
        self.state = State(1, "starting")
        self._publish(self.state)
        self._thread = threading.Thread(target=self._keep, name="engine-host", daemon=True)
        self._thread.start()

    def close(self, patience: float = 5.0) -> None:
        """Stop the child: asked, then told, then killed."""
        self._closing.set()
        self._thread.join(patience + 2.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the thread -----------------------------------------------------------------------------
    def _keep(self) -> None:
        try:
            while self._live_once():
                pass
        except Exception as error:
            log.exception("the engine's host failed")
            self._publish(msgspec.structs.replace(
                self.state, condition="dead", error=f"{type(error).__name__}: {error}"
            ))  # fmt: skip

    def _live_once(self) -> bool:
        """One child from its start to its end; whether there will be another."""
        generation = self.state.generation
        place = self.folder / str(generation)
        place.mkdir(exist_ok=True)
        (place / CONFIG).write_bytes(
            for_recording(self._payload)
        )  # a recording is of use with it only
        reading, writing = os.pipe()
        self.child = child = self._spawn(generation, writing)
        os.close(writing)
        listener = Listener(reading)
        try:
            died = self._watch(child, listener)
        finally:
            listener.close()
            end(child, 5.0)
        if died is None:
            self._publish(State(generation, "closed"))
            return False
        return self._after(died)

    def _spawn(self, generation: int, lifeline: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "quire.engine.process",
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

    def _watch(self, child: subprocess.Popen[bytes], listener: Listener) -> Died | None:
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
            for message in listener.hear(0.2):
                heard = clock()
                match message:
                    case Ready():
                        ready = True
                        self._publish(State(
                            self.state.generation, "ready", ready=message, lost=self.state.lost
                        ))  # fmt: skip
                    case Died():
                        last_words = message
                    case Beat() if ready and message.busy > message.allowed:
                        why = (
                            f"a step, or a function of the engine, has taken {message.busy:.0f} s, and"
                            f" {message.allowed:.0f} s is what it may take (a step: at this machine's pace)"
                        )
                        return self._hung(child, why)
            if listener.broken:
                code = exit_code(child)
                return last_words or Died(f"the engine process ended {code}")
            if ready and 0 < patience.heartbeat < clock() - heard:
                return self._hung(child, f"no sign of life for {patience.heartbeat:.0f} s")
            if not ready and clock() - began > patience.start:
                return self._hung(child, f"the model was not loaded after {patience.start:.0f} s")
        return None

    def _hung(self, child: subprocess.Popen[bytes], why: str) -> Died:
        """Have both processes write their stacks, then kill the child."""
        log.error("the engine hangs: %s; the stacks of both processes follow", why)
        faulthandler.dump_traceback(all_threads=True)
        with contextlib.suppress(OSError):
            child.send_signal(signal.SIGUSR1)  # engine/process.py answers with its stacks
        time.sleep(1.0)
        child.kill()
        return Died(f"the engine hung: {why}")

    def _after(self, died: Died) -> bool:
        """Say what was lost; begin again if that is still allowed."""
        state, now = self.state, time.monotonic()
        began = state.condition == "starting"
        recording = None if began else self._recording()
        self._deaths.append(now)
        while now - self._deaths[0] > self.patience.window:
            self._deaths.popleft()
        text = died.error
        if began or len(self._deaths) > self.patience.restarts:
            if not began:  # a start that fails is reported by whoever waits for it
                text += f" (and {len(self._deaths)} times in a row: it is not started again)"
                log.error("%s%s", text, f"\n{died.traceback}" if died.traceback else "")
            self._publish(State(state.generation, "dead", error=text, traceback=died.traceback))
            return False
        log.error("%s; it is started again\n%s", text, died.traceback)
        lost = sorted(recording.seen()) if recording else []
        self._publish(State(state.generation + 1, "restarting", error=text, lost=lost))
        return True

    def _recording(self) -> flight.Recording | None:
        """What the dead engine did last; kept for `quire replay`."""
        folder = self.folder / str(self.state.generation)
        try:
            recording = flight.read(folder)
        except (OSError, ValueError):
            log.exception("the flight recording could not be read")
            return None
        if recording is not None:
            try:
                log.error("the last steps are in %s: quire replay shows them", keep(folder))
            except OSError as why:
                log.warning("the flight recording could not be kept: %s", why)
        return recording

    def _publish(self, state: State) -> None:
        self.state = state
        new = self.folder / "state.new"
        new.write_bytes(msgspec.msgpack.encode(state))
        new.replace(self.folder / "state")


class StateFile:
    """A front room's view of the state; reading it again costs a stat."""

    def __init__(self, folder: Path):
        self._path = folder / "state"
        self._seen = (0, 0)
        self.now = State(1, "starting")

    def look(self) -> State:
        """The latest; the last known one, closed, when the host is gone."""
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_ino) != self._seen:
                self.now = msgspec.msgpack.decode(self._path.read_bytes(), type=State)
                self._seen = (stat.st_mtime_ns, stat.st_ino)
        except FileNotFoundError:
            self.now = msgspec.structs.replace(self.now, condition="closed")
        return self.now


def keep(folder: Path) -> Path:
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


def exit_code(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(2.0)
    except subprocess.TimeoutExpired:
        return "its lifeline, but not itself"
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory, perhaps)" if code == -signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"


def end(child: subprocess.Popen[bytes], patience: float) -> None:
    """Stop a child that may be alive: asked, then killed."""
    if child.poll() is None:
        child.send_signal(STOP)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
