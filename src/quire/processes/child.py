"""A child process, from both sides: how it is started and ended, how it ended, and that it never outlives its parent.

Knows programs, signals and descriptors. Does not know what a child does, or whether it is started again
(`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire import env
from quire.logging import configure, get_logger

log = get_logger(__name__)

STOP = signal.SIGUSR2
"""The parent's stop signal. Not SIGTERM, which service managers send to every process of a group."""

STACKS = signal.SIGUSR1
"""A child writes the stacks of its threads to its standard error."""

STOPPED_LOOKS = 15
KILLED_S = 10.0  # a killed process has ended by then, unless a device or a disk blocks it
PR_SET_PDEATHSIG = 1
COLLECT_AFTER = (20_000, 20, 50)
"""Thresholds of Python's garbage collector: new objects, then collections of the younger generations. Python's default begins with 700
objects: a start makes 300,000, so it collected 440 times."""


# -- in the parent --------------------------------------------------------------------------------
def start_child(
    module: str,
    args: Sequence[object],
    payload: bytes = b"",
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Run `python -m MODULE ARGS`, a new program and not a fork.

    Args:
        payload: what it reads from its standard input.
        fds: descriptors that it inherits.
        environment: None: this process's.

    Raises:
        OSError: no process or memory is free.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, args)],
        stdin=subprocess.PIPE,
        pass_fds=fds,
        env=env.for_a_child() if environment is None else environment,
    )
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it is already dead
            child.stdin.write(payload)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    return child


def end_child(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Stop a child that may be alive; kill it if it has not ended after that time."""
    if child.poll() is None:
        child.send_signal(STOP)
        wait_or_kill(child, seconds)


def wait_or_kill(child: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for a child that was asked to end; kill it if it has not ended after that time."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel; ends later
            child.wait(KILLED_S)


def how_it_ended(child: subprocess.Popen[bytes], seconds: float = 2.0) -> str:
    """What became of a child whose pipe is closed, or is not read: "ended with exit code 1"."""
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        stopped = "is stopped (SIGSTOP, or a debugger)"
        return stopped if is_stopped(child.pid) else "neither answers nor ends"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = "; the kernel sends this signal when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{why}"


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process of this machine. False where the system does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


class StopCounter:
    """Counts the looks, a second each, that find a child stopped. Not seconds: its parent may have been stopped with it."""

    def __init__(self, pid: int):
        self._pid, self._count = pid, 0

    def look(self) -> bool:
        """Whether this one and those before it, STOPPED_LOOKS in all, found it stopped."""
        self._count = self._count + 1 if is_stopped(self._pid) else 0
        return self._count >= STOPPED_LOOKS


def own_stacks() -> str:
    """The stacks of all threads. Not written directly to the terminal, which may block all threads."""
    with (
        contextlib.suppress(OSError, AttributeError),
        os.fdopen(os.memfd_create("stacks"), "w+b") as file,
    ):
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return "(the stacks of this process could not be read)"


# -- in the child ---------------------------------------------------------------------------------
def begin_child(name: str, parent: int, lasting: bool = True) -> None:
    """The first call of a supervised child.

    Args:
        name: of the process, in the log.
        parent: the process id of its parent.
        lasting: the thread that started it lasts as long as the parent (`end_with_parent`).
    """
    gc.set_threshold(*COLLECT_AFTER)
    configure(name)
    leave_signals_to_parent()
    faulthandler.register(STACKS, all_threads=True)
    (end_with_parent if lasting else watch_parent)(parent)


def leave_signals_to_parent() -> None:
    """A terminal or a service manager sends them to the whole group, and only the parent knows when this process may end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGKILL when the thread that started this process ends; and `watch_parent`.

    So the parent must start it in a thread that lasts as long as the parent.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        log.debug("prctl is not available")
    if os.getppid() != parent:
        os._exit(1)
    watch_parent(parent)


def watch_parent(parent: int) -> None:
    """End this process within a second of its parent's end."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def exit_child(code: int) -> NoReturn:
    """End this process without waiting for its threads: they may block on sockets for ever."""
    with contextlib.suppress(OSError):  # a closed pipe, or a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
