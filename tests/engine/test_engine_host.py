"""EngineSupervisor over small programs instead of an engine: deaths, full disks, a supervisor that fails itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine import supervisor as module
from quire.engine.engine_state import EngineState, StateBoard
from quire.engine.supervisor import EngineSupervisor, own_folder
from quire.errors import StartupError
from quire.processes.child import own_stacks
from quire.processes.restart_policy import RestartPolicy
from quire.protocol.output import StartupStatus

CHILD = """
import sys, time
from quire.processes.status_pipe import StatusWriter
from quire.protocol.output import EngineDied, EngineReady, Heartbeat, StartupStatus
status, how = StatusWriter(int(sys.argv[1])), sys.argv[2]
if how == "fails":
    status.send(EngineDied("no weights"))
    sys.exit(1)
if how == "loads":
    status.send(StartupStatus("reading weights", 0.5))
    time.sleep(60)
status.send(EngineReady(60, 100, 4, 97, "float32", "cpu", "Toy", "native", 1))
while how == "lives":
    time.sleep(0.2)
    status.send(Heartbeat(0, 0.0, 1.0))
"""
SOURCE = str(Path(module.__file__).parents[2])
FULL = OSError(28, "No space left on device")


class Host(EngineSupervisor):
    """`how`: behaviours of its children, one after another; the last one repeats."""

    def __init__(self, *how: str, **policy: Any):
        self.how = how
        super().__init__(b"", policy=RestartPolicy(**{"retry": 0.5} | policy))

    def _spawn(self, epoch: int, status_fd: int) -> subprocess.Popen[bytes]:
        how = self.how[min(epoch, len(self.how)) - 1]
        if how == "no process":
            raise OSError(11, "Resource temporarily unavailable")
        words = [sys.executable, "-c", CHILD, str(status_fd), how]
        env = {**os.environ, "PYTHONPATH": SOURCE}
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[status_fd], env=env)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Host]]:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    made: list[Host] = []

    def start(*how: str, **policy: Any) -> Host:
        made.append(Host(*how, **policy))
        return made[-1]

    yield start
    for one in made:
        one.close()
        assert not one.folder.exists()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def is_ready(host: Host, epoch: int) -> Callable[[], bool]:
    return lambda: (host.state.epoch, host.state.condition) == (epoch, "ready")


def test_a_start_that_fails_is_the_end(make: Callable[..., Host]) -> None:
    host = make("fails")
    until(lambda: host.state.condition == "dead")
    assert host.state.error == "no weights"


def test_the_progress_of_a_start_is_on_the_board(make: Callable[..., Host]) -> None:
    """For each HTTP process, which reads the board through a descriptor of its own."""
    host = make("loads")
    reader = StateBoard(os.dup(host.board.fd))
    assert reader.read().startup == StartupStatus("starting the engine")
    until(lambda: host.state.startup == StartupStatus("reading weights", 0.5))
    assert reader.read().startup == host.state.startup
    assert (str(host.state.startup), host.state.condition) == ("reading weights (50%)", "starting")


def test_a_start_after_a_death_that_fails_is_tried_again(make: Callable[..., Host]) -> None:
    host = make("dies", "fails", "no process", "lives", restarts=9)
    until(is_ready(host, 4))


def test_too_many_deaths_delay_the_next_start(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    states, publish = list[EngineState](), StateBoard.publish
    monkeypatch.setattr(StateBoard, "publish", lambda self, state: states.append(state) or publish(self, state))  # fmt: skip
    host = make("dies", "dies", "lives", restarts=1)
    until(is_ready(host, 3))
    (delayed,) = [state for state in states if state.condition == "delayed"]
    assert delayed.incident


def test_a_stop_does_not_wait_for_a_delayed_restart(make: Callable[..., Host]) -> None:
    host = make("dies", restarts=1, retry=1000.0)
    until(lambda: host.state.condition == "delayed")
    host.close()
    assert host.state.condition == "closed"
    assert not host._thread.is_alive()


def test_a_deleted_folder_is_created_again(make: Callable[..., Host]) -> None:
    host = make("lives", "lives")
    until(is_ready(host, 1))
    shutil.rmtree(host.folder)
    host.child.process.kill()
    until(is_ready(host, 2))
    assert host.folder.stat().st_mode & 0o777 == 0o700
    assert (host.folder / "2").is_dir()


def test_a_full_disk_does_not_hide_the_cause_of_a_crash(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the state could not be written, stayed "ready", and every request hung."""
    host = make("lives", "lives", restarts=1)
    until(is_ready(host, 1))
    full = threading.Event()
    full.set()
    for name in ("write_bytes", "mkdir", "replace", "open"):
        before = getattr(Path, name)

        def wrapped(self: Path, *args: Any, before: Any = before, **more: Any) -> Any:
            if full.is_set() and host.folder in (self, *self.parents):
                raise FULL
            return before(self, *args, **more)

        monkeypatch.setattr(Path, name, wrapped)
    host.child.process.kill()
    until(lambda: host.state.condition == "delayed")
    full.clear()
    until(is_ready(host, 2))


def test_an_unwritable_recording_is_skipped(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(module.flight_recorder, "read_recording", fails)
    host = make("dies", "lives")
    until(is_ready(host, 2))
    assert (host.state.recorded, host.state.lost) == (False, {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError("a fault of ours"), SystemExit()])
def test_a_failing_host_reports_the_error(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Also if its thread ends without a message."""

    def fails(self: EngineSupervisor, child: Any, listener: Any) -> Any:
        raise error

    monkeypatch.setattr(EngineSupervisor, "_watch", fails)
    host = make("lives")
    until(lambda: host.state.condition == "dead")
    assert host.state.error


def test_no_directory_for_the_sockets_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(prefix: str, dir: str | None) -> str:
        raise FULL

    monkeypatch.setattr(tempfile, "mkdtemp", fails)
    with pytest.raises(StartupError, match=r"No space left on device.*set TMPDIR"):
        own_folder()


def test_an_unwritable_directory_has_a_fallback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = tempfile.mkdtemp

    def mkdtemp(prefix: str, dir: str | None) -> str:
        if dir is None:
            raise FileNotFoundError(2, "No usable temporary directory found")
        return before(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    made = own_folder()
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o700


def test_stacks_are_text() -> None:
    assert "test_stacks_are_text" in own_stacks()
