"""A supervised child over small programs: messages, silence, a hang with stacks, its end; and when it starts again."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quire
from quire.processes.child import how_it_ended, start_child
from quire.processes.restart_policy import RestartCount, RestartPolicy
from quire.processes.status_pipe import StatusReader, StatusWriter
from quire.processes.supervisor import SupervisedProcess
from quire.protocol.output import EngineDied, Heartbeat

CHILD = """
import os, signal, sys, time
from quire.processes.child import STOP, begin_child, exit_child
from quire.processes.status_pipe import StatusWriter
from quire.protocol.output import EngineDied, Heartbeat
status, how = StatusWriter(int(sys.argv[1])), sys.argv[2]
begin_child("child", os.getppid())
status.send(Heartbeat(1, 0.0, 1.0))
if how == "fails":
    status.send(EngineDied("for a reason " + "x" * 200_000))
    exit_child(3)
if how == "deaf":
    signal.signal(STOP, signal.SIG_IGN)
status.send(Heartbeat(2, 0.0, 1.0))
time.sleep(600)
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def start(how: str) -> SupervisedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}

    def spawn(status_fd: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", CHILD, str(status_fd), how]
        return subprocess.Popen(words, pass_fds=[status_fd], env=environment)

    return SupervisedProcess(spawn)


def heard(child: SupervisedProcess, count: int) -> list[object]:
    messages: list[object] = []
    end = time.monotonic() + 60
    while len(messages) < count and not child.status.broken:
        assert time.monotonic() < end
        messages += child.poll(0.2)
    return messages


def test_the_last_message_and_the_exit_code_of_a_child_arrive() -> None:
    child = start("fails")
    first, last = heard(child, 2)
    assert first == Heartbeat(1, 0.0, 1.0)
    assert isinstance(last, EngineDied)
    assert len(last.error) > 200_000
    while not child.status.broken:
        child.poll(0.2)
    assert how_it_ended(child.process) == "ended with exit code 3"
    child.end(1.0)
    child.end(1.0)  # again: nothing happens


@pytest.mark.parametrize("how", ["lives", "deaf"])
def test_a_child_is_stopped_or_killed(how: str) -> None:
    child = start(how)
    heard(child, 2)
    child.end(0.5 if how == "deaf" else 60.0)
    assert child.has_ended
    assert how_it_ended(child.process).startswith(
        "was ended by " + ("SIGKILL" if how == "deaf" else "SIGUSR2")
    )


def test_a_hanging_child_writes_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    child = start("lives")
    heard(child, 2)
    assert not child.is_silent(60.0)
    assert not child.is_silent(0)
    child.heard -= 100
    assert child.is_silent(60.0)
    child.kill_hanging()
    assert "SIGKILL" in how_it_ended(child.process, 60)
    assert "most recent call first" in capfd.readouterr().err
    child.end(1.0)


def test_a_suspension_of_the_supervisor_is_not_a_hang_of_the_child() -> None:
    child = start("lives")
    heard(child, 2)
    child.heard -= 100
    child.polled -= 100
    child.poll(0)
    assert not child.is_silent(60.0)
    child.end(1.0)


def test_a_spawn_that_fails_leaves_no_descriptor() -> None:
    def spawn(status_fd: int) -> subprocess.Popen[bytes]:
        raise OSError(11, "Resource temporarily unavailable")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="temporarily"):
        SupervisedProcess(spawn)
    assert (
        len(os.listdir("/proc/self/fd")) <= before
    )  # descriptors of other tests may be closed meanwhile


def test_a_child_that_dies_before_reading_its_payload_raises_no_error() -> None:
    child = start_child("quire.no_such_module", [], b"x" * 1_000_000)
    assert how_it_ended(child, 60) == "ended with exit code 1"


def test_restarts_are_immediate_then_late_then_forgotten() -> None:
    clock = Clock()
    count = RestartCount(RestartPolicy(restarts=2, window=60.0, retry=30.0), clock)
    assert [count.after_death().delay for _ in range(4)] == [0.0, 0.0, 30.0, 30.0]
    assert "4 times" not in count.after_death().text
    clock.now += 61
    assert count.after_death() == (0.0, "restarting it")


def test_a_limit_of_zero_restarts_allows_none() -> None:
    delay, text = RestartCount(RestartPolicy(restarts=0)).after_death()
    assert delay is None
    assert "not restarted" in text


def test_a_status_pipe_with_a_high_descriptor() -> None:
    """A server with a thousand connections starts its engine again: `select.select` refused its pipe."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reading, writing = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    try:
        reader = StatusReader(fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 1100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(reading)
    writer = StatusWriter(writing)
    writer.send(Heartbeat(1, 0.0, 1.0))
    assert reader.poll(10) == [Heartbeat(1, 0.0, 1.0)]
    os.close(writing)
    assert reader.poll(10) == []
    assert reader.broken
    reader.close()


def test_a_child_that_freezes_in_the_middle_of_a_message_does_not_hold_its_supervisor() -> None:
    reading, writing = os.pipe()
    reader, writer = StatusReader(reading), StatusWriter(writing)
    os.set_blocking(writing, False)
    message = EngineDied("x" * 100_000)  # larger than the pipe
    with pytest.raises(BlockingIOError):
        writer.send(message)
    began = time.monotonic()
    assert reader.poll(0.05) == reader.poll(0.05) == []
    assert time.monotonic() - began < 5
    assert not reader.broken
    os.close(writing)
    while not reader.broken:
        assert reader.poll(0.05) == []
    reader.close()


def test_a_supervisor_that_is_suspended_in_its_wait_does_not_find_its_child_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("quire.processes.supervisor.time.monotonic", lambda: clock[0])
    child = SupervisedProcess(sleeper)
    try:
        for seconds, is_silent in ((0.25, False), (30.0, False), (2.0, False), (2.1, True)):
            monkeypatch.setattr(child.status, "poll", lambda wait, s=seconds: clock.__setitem__(0, clock[0] + s) or [])  # fmt: skip
            assert child.poll(0.25) == []
            assert child.is_silent(4.0) == is_silent
    finally:
        monkeypatch.undo()
        child.end(0)


def sleeper(status_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
