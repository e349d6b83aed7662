"""A `quire serve` as a process: started, asked, stopped."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

START_S = 200.0  # a busy machine imports torch slowly; a test has 240
PATIENCE_S = 120.0  # for what is there at once elsewhere
SOURCE = str(Path(__file__).parents[2] / "src")
# what runs in a process
ENGINE, RANK = "quire.engine.engine_main", "quire.executor.worker_main"
GRAMMAR = "quire.features.structured.grammar_server"


class Served:
    """`with Served(checkpoint) as server:` is ready inside."""

    def __init__(self, model: str, *flags: str, env: dict[str, str] | None = None,
                 cwd: str | None = None, before: tuple[str, ...] = ()):  # fmt: skip
        words = [*before, sys.executable, "-m", "quire", "serve", model, "--host", "127.0.0.1", "--port", "0",
                 "--kv-cache-memory-bytes", "4M", "--dtype", "float32", *flags]  # fmt: skip
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, **(env or {})},
            cwd=cwd,
        )
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                self._new.put(line)
            self.process.stdout.close()
        self._new.put(None)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def until(self, pattern: str) -> str:
        """The first line from now on, or before, that has `pattern` in it."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            for line in self.lines:
                if re.search(pattern, line):
                    return line
            try:
                if self._new.get(timeout=0.5) is None:
                    break
            except queue.Empty:
                pass
        raise AssertionError(f"no line with {pattern!r}:\n{self.output}")

    def __enter__(self) -> Served:
        try:
            self.curl = shlex.split(self.until(r"^curl "))
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        self.url = re.findall(r"http://[\d.]+:\d+", self.until("address .*http://"))[0]
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.stop(signal.SIGTERM)

    def stop(self, number: int) -> int:
        """The exit status after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        try:
            code = self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
        self._reader.join(PATIENCE_S)
        return code

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str, label: str = "") -> float:
        """The sum over those that have `label`, as it is written."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name + "{") and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def let_it_tell(client: httpx.Client) -> None:
    """Have the engine count all that was asked before, and its counts arrive at the HTTP process of `client`: they follow
    the first answer. In development mode."""
    for _ in range(2):
        assert client.post("/reset_prefix_cache").status_code == 200


def parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return found


def children(pid: int) -> list[int]:
    """Processes of which this one is the parent."""
    return [child for child, parent in parents().items() if parent == pid]


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found, pairs = [pid], parents().items()
    for one in found:
        found += [child for child, parent in pairs if parent == one]
    return found


def running(pid: int, *modules: str) -> list[int]:
    """Processes of a family that run `python -m` one of the modules."""
    found = []
    for one in family(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{one}/cmdline").read_text().split("\0")
            if not set(modules).isdisjoint(words):
                found.append(one)
    return sorted(found)


def left(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Those that still exist after a while."""
    end = time.monotonic() + seconds
    while (
        found := [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def has_torch(pid: int) -> bool:
    """Whether a process has torch's library in its memory."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
