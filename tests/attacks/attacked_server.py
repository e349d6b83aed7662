"""A `quire serve` that tests attack: limited in time and memory, on this machine only, and measured.

Knows processes, memory, probes and streams of a server. Does not know the attacks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

import httpx
from server_process import SOURCE, Served, family

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# The tests can attack another version of Quire: QUIRE_ATTACKED_SOURCE=/old/checkout/src.
ATTACKED = os.environ.get("QUIRE_ATTACKED_SOURCE", SOURCE)
FLAGS = ("--kv-cache-memory-bytes", "64M", "--max-num-seqs", "64", "--max-model-len", "2048")
INNOCENT = {
    "prompt": "Once upon a time",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
HTTP_MIB = 512  # limit of the HTTP process above idle, for any request
TOTAL_MIB = 4096  # limit of all processes above idle; beyond it they are killed
ATTACK_S = 60.0
PROBE_S = 2.0  # on a busy machine; requests that block the event loop made it 4 s and more
SAMPLE_S, PROBE_EVERY_S = 0.05, 0.1
SETTLE_S = 20.0
SPARE_FILES, SPARE_THREADS, SPARE_PROCESSES = 8, 8 + (os.cpu_count() or 1), 4


class OtherMachineError(Exception):
    """An attack names an address of another machine."""


def check_local(address: object) -> None:
    """Raises OtherMachineError unless `address` (of a socket: a path, or host and port) is of this machine."""
    if isinstance(address, str | bytes):
        return  # a unix socket
    host = str(address[0]) if isinstance(address, tuple) and address else repr(address)
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return
    if host != "localhost":
        raise OtherMachineError(
            f"attacks are for this machine; {host!r} is not its loopback address"
        )


@contextlib.contextmanager
def only_this_machine() -> Iterator[None]:
    """Within it, no socket of this process connects to another machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def check(own: socket.socket, address: Any) -> None:
        try:
            check_local(address)
        except OtherMachineError:
            own.close()
            raise

    def checked(self: socket.socket, address: Any) -> None:
        check(self, address)
        connect(self, address)

    def checked_ex(self: socket.socket, address: Any) -> int:
        check(self, address)
        return connect_ex(self, address)

    socket.socket.connect, socket.socket.connect_ex = checked, checked_ex
    try:
        yield
    finally:
        socket.socket.connect, socket.socket.connect_ex = connect, connect_ex


# -- processes ------------------------------------------------------------------------------------
def role(pid: int, first: int) -> str:
    """`http`, `engine`, or `helper` (templates and grammars have processes of their own)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        words = ""
    if pid == first or "quire.server.process.http_worker" in words:
        return "http"
    return "engine" if "quire.engine" in words or "quire.executor" in words else "helper"


def follows_grammar(pid: int) -> bool:
    """Whether this process compiles and advances grammars. The engine keeps a limited number of them."""
    try:
        return (
            "quire.features.structured.grammar_server" in Path(f"/proc/{pid}/cmdline").read_text()
        )
    except OSError:
        return False


def rss_mib(pid: int) -> float:
    """Resident memory; 0 for a dead process. Excludes the pages that grammar processes share."""
    try:
        if follows_grammar(pid):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
    except (OSError, IndexError):
        return 0.0


def peak_mib(pid: int) -> float:
    """Peak resident memory since `reset_peak`; 0 for a dead process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        return 0.0


def reset_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def counted(pids: list[int]) -> dict[str, int]:
    """Processes, threads and open files, without the grammar processes that the engine keeps."""
    grammars = {
        pid for pid in pids if follows_grammar(pid)
    }  # the engine keeps them, with an open file for each
    found = {"processes": len(pids) - len(grammars), "threads": 0, "files": -len(grammars)}
    for pid in pids:
        if pid in grammars:
            continue
        with contextlib.suppress(OSError):
            found["threads"] += len(os.listdir(f"/proc/{pid}/task"))
            found["files"] += len(os.listdir(f"/proc/{pid}/fd"))
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds that the processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# -- measures -------------------------------------------------------------------------------------
@dataclass
class Measured:
    """The effects of one attack on the server. Memory is in MiB above that at the start of the attack."""

    http_mib: float = 0.0
    engine_mib: float = 0.0
    helper_mib: float = 0.0
    probes: list[float] = field(default_factory=list)
    """Latencies of /health/live in seconds; infinity if it did not answer."""
    killed: str = ""
    """Why the watcher killed the server."""
    engine_replaced: bool = False
    left: list[str] = field(default_factory=list)
    """Processes, threads and files that the attack left behind."""
    innocent: str = ""
    """The error of a normal request after the attack."""

    @property
    def slowest_probe(self) -> float:
        return max(self.probes, default=float("inf"))

    @property
    def wrong(self) -> list[str]:
        """Effects that no attack may have."""
        replaced = "the engine was restarted" if self.engine_replaced else ""
        return [line for line in (self.killed, self.innocent, replaced, *self.left) if line]

    def check(self, http_mib: float = HTTP_MIB, engine_mib: float = HTTP_MIB, probe_s: float = PROBE_S) -> None:  # fmt: skip
        """Raises AssertionError with every measure that exceeds its limit."""
        wrong = self.wrong
        if self.http_mib > http_mib:
            wrong.append(f"the HTTP process took {self.http_mib:.0f} MiB, at most {http_mib:g}")
        if self.engine_mib > engine_mib:
            wrong.append(f"the engine took {self.engine_mib:.0f} MiB, at most {engine_mib:g}")
        if self.slowest_probe > probe_s:
            wrong.append(f"a probe took {self.slowest_probe:.2f} s, at most {probe_s:g}")
        assert not wrong, f"{'; '.join(wrong)} ({self})"

    def __str__(self) -> str:
        probes = f"slowest probe {self.slowest_probe:.2f} s, median {statistics.median(self.probes or [0]):.3f} s"
        return f"http +{self.http_mib:.0f} MiB, engine +{self.engine_mib:.0f} MiB, helpers {self.helper_mib:.0f} MiB, {probes}"


@dataclass
class Gaps:
    """Seconds between the tokens of a normal stream: without the attack, and during it."""

    alone: list[float]
    beside: list[float]

    @property
    def ratio(self) -> float:
        """The mean gap during the attack, relative to that without it."""
        return statistics.fmean(self.beside) / statistics.fmean(self.alone)

    def __str__(self) -> str:
        mean = [1000 * statistics.fmean(part) for part in (self.alone, self.beside)]
        worst = [1000 * max(part) for part in (self.alone, self.beside)]
        return (
            f"gaps {mean[0]:.1f} -> {mean[1]:.1f} ms, longest {worst[0]:.0f} -> {worst[1]:.0f} ms"
        )


class AttackedServer(Served):
    """`with AttackedServer() as server:` serves the embedded model; `server.attack()` limits and measures an attack."""

    _alive: ClassVar[list[AttackedServer]] = []

    def __init__(self, *flags: str, env: dict[str, str] | None = None, model: str = "quire-tiny", key: str = "", before: tuple[str, ...] = ()):  # fmt: skip
        if self._alive:
            raise RuntimeError("one attacked server at a time: another still runs")
        self._alive.append(self)
        self.key, self.expected = key, ""
        self.spoiled = False
        """An attack succeeded: later tests must not use this server."""
        super().__init__(
            model, *FLAGS, *flags, env={"PYTHONPATH": ATTACKED, **(env or {})}, before=before
        )

    def __enter__(self) -> AttackedServer:
        try:
            super().__enter__()
        except BaseException:
            self._alive.remove(self)
            raise
        check_local((httpx.URL(self.url).host,))
        if self.key:
            self.client.headers["Authorization"] = f"Bearer {self.key}"
        self.expected = self.innocent()
        self.expected = self.innocent()  # again, after one-time work such as caches
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.kill()
            self._alive.remove(self)

    def kill(self) -> None:
        for pid in reversed(family(self.process.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def engine(self) -> int:
        """Pid of the engine."""
        pids = family(self.process.pid)
        return next(pid for pid in pids if role(pid, self.process.pid) == "engine")

    def signal_engine(self, number: int) -> None:
        os.kill(self.engine(), number)

    # -- what attacks are made of -----------------------------------------------------------------
    def connection(self, timeout: float = 30.0) -> socket.socket:
        """A raw socket, for bytes that no client library would send."""
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port), timeout=timeout)

    def ask(self, path: str, body: Any, timeout: float = 60.0) -> httpx.Response:
        """POST a body: bytes unchanged, other values as JSON. Returns the answer, whatever its status."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        return self.client.post(path, content=raw, headers=head, timeout=timeout)

    def until_quiet(self, seconds: float) -> None:
        """Wait until no request runs or waits."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while sum(map(self.metric, names)) or self.client.get("/load").json() != {"server_load": 0}:
            assert time.monotonic() < end, "requests are still running"
            time.sleep(0.2)

    # -- innocents --------------------------------------------------------------------------------
    def innocent(self, timeout: float = 30.0) -> str:
        """The token ids of a normal greedy request, as JSON."""
        answer = self.ask(TEXT, INNOCENT, timeout)
        assert answer.status_code == 200, answer.text
        return json.dumps(answer.json()["choices"][0]["token_ids"])

    def gaps(self, tokens: int = 200) -> list[float]:
        """Seconds between the tokens of a normal stream; 0 between those that one event brings."""
        body = INNOCENT | {"max_tokens": tokens, "stream": True}
        times = []
        with self.client.stream("POST", TEXT, json=body, timeout=ATTACK_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    tokens_of = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    times += [time.perf_counter()] * len(tokens_of or ())
        return [after - before for before, after in pairwise(times)]

    def gaps_beside(self, attack: Callable[[threading.Event], None], rounds: int = 3, tokens: int = 200) -> Gaps:  # fmt: skip
        """Streams without and with `attack` in turn; the attack runs in a thread until the event is set."""
        found = Gaps([], [])
        for _ in range(rounds):
            found.alone += self.gaps(tokens)
            over = threading.Event()
            thread = threading.Thread(target=attack, args=(over,), daemon=True)
            thread.start()
            time.sleep(0.3)  # until it has begun
            try:
                found.beside += self.gaps(tokens)
            finally:
                over.set()
                thread.join(ATTACK_S)
        return found

    def cores(self, seconds: float = 3.0) -> float:
        """CPU cores that all processes of the server use, measured for `seconds`."""
        before = cpu_seconds(family(self.process.pid))
        time.sleep(seconds)
        return (cpu_seconds(family(self.process.pid)) - before) / seconds

    # -- the bounds and the measures ---------------------------------------------------------------
    @contextlib.contextmanager
    def attack(self, seconds: float = ATTACK_S, total_mib: float = TOTAL_MIB) -> Iterator[Measured]:
        """Kill the server after `seconds`, or when its processes use `total_mib` above idle; measure until the end."""
        watch, spoiled = Watch(self, seconds, total_mib), True
        try:
            with watch:
                yield watch.found
            watch.afterwards()
            spoiled = watch.found.wrong != []
        except (httpx.HTTPError, OSError) as error:
            if not watch.found.killed:
                raise
            raise AssertionError(watch.found.killed) from error
        finally:
            self.spoiled |= spoiled
            note(str(watch.found), *watch.found.wrong)


class Watch:
    """Two threads: one samples memory and kills the server, one probes /health/live."""

    def __init__(self, server: AttackedServer, seconds: float, total_mib: float):
        self.server, self.total_mib = server, total_mib
        self.seconds, self.found = seconds, Measured()
        self.over = threading.Event()
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._sample, self._probe)]  # fmt: skip

    def __enter__(self) -> Measured:
        self.first = self.server.process.pid
        pids = family(self.first)
        self.counts = counted(pids)
        self.engines = {pid for pid in pids if role(pid, self.first) == "engine"}
        self.idle = {pid: rss_mib(pid) for pid in pids}
        for pid in pids:
            reset_peak(pid)
        self.end = time.monotonic() + self.seconds
        for thread in self.threads:
            thread.start()
        return self.found

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _sample(self) -> None:
        pids: list[int] = []
        looked = 0.0
        roles: dict[int, str] = {}
        while True:
            last, now = self.over.is_set(), time.monotonic()
            if last or now - looked > 5 * SAMPLE_S:
                pids, looked = family(self.first), now
                roles = {pid: role(pid, self.first) for pid in pids}
            taken = {"http": 0.0, "engine": 0.0, "helper": 0.0}
            for pid in pids:
                measure = peak_mib if last and pid in self.idle else rss_mib
                above = measure(pid) - self.idle.get(pid, 0.0)
                # With several HTTP processes, the largest counts.
                taken[roles[pid]] = max(taken[roles[pid]], above) if roles[pid] == "http" else taken[roles[pid]] + above  # fmt: skip
            found = self.found
            found.http_mib = max(found.http_mib, taken["http"])
            found.engine_mib = max(found.engine_mib, taken["engine"])
            found.helper_mib = max(found.helper_mib, taken["helper"])
            if last:
                return
            if sum(taken.values()) > self.total_mib:
                self._kill(f"the server took {sum(taken.values()):.0f} MiB above idle, and was killed at {self.total_mib:g}")  # fmt: skip
            elif now > self.end:
                self._kill(f"the attack took longer than its {self.seconds:g} s")
            self.over.wait(SAMPLE_S)

    def _kill(self, why: str) -> None:
        if not self.found.killed:
            self.found.killed = why
            self.server.kill()

    def _probe(self) -> None:
        while not self.over.is_set() and not self.found.killed:
            begun = time.perf_counter()
            try:
                answered = probe(self.server)
            except OSError:
                answered = False
            if not self.found.killed:
                took = time.perf_counter() - begun
                self.found.probes.append(took if answered else float("inf"))
            self.over.wait(PROBE_EVERY_S)

    def afterwards(self) -> None:
        """Measures and checks after the attack."""
        found = self.found
        if found.killed:
            return
        try:
            tokens = self.server.innocent()
            if tokens != self.server.expected:
                found.innocent = f"an innocent request got {tokens} instead of {self.server.expected}"  # fmt: skip
        except (AssertionError, httpx.HTTPError) as error:
            found.innocent = f"an innocent request failed: {type(error).__name__}: {error}"
        pids = family(self.first)
        found.engine_replaced = {pid for pid in pids if role(pid, self.first) == "engine"} != self.engines  # fmt: skip
        allowed = {"processes": SPARE_PROCESSES, "threads": SPARE_THREADS, "files": SPARE_FILES}
        end = time.monotonic() + SETTLE_S
        while True:
            now = counted(family(self.first))
            found.left = [f"{self.counts[name]} {name} became {now[name]}" for name in now if now[name] > self.counts[name] + allowed[name]]  # fmt: skip
            if not found.left or time.monotonic() > end:
                return
            time.sleep(0.2)


def probe(server: AttackedServer, timeout: float = 30.0) -> bool:
    """Whether /health/live answers 200 on a new connection."""
    with server.connection(timeout) as own:
        own.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return own.recv(64).startswith(b"HTTP/1.1 200")


def note(*figures: str) -> None:
    """Print figures of the current test, and append them to the file QUIRE_ATTACK_FIGURES."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("/")[2].partition(" ")[0]
    line = f"{test}: {'; '.join(part for part in figures if part)}"
    print(line)
    if kept := os.environ.get("QUIRE_ATTACK_FIGURES"):
        with open(kept, "a") as file:
            file.write(line + "\n")


def together(count: int, work: Callable[[int], Any], timeout: float = ATTACK_S) -> list[Any]:
    """The result or exception of `work(number)` in each of `count` threads at once."""
    found: list[Any] = [TimeoutError()] * count

    def run(number: int) -> None:
        try:
            found[number] = work(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return found
