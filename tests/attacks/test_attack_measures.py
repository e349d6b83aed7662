"""Tests of the measures: each limit can be exceeded, and a normal request exceeds none."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from attacked_server import TEXT, AttackedServer, Measured, OtherMachineError, Watch

TESTS = Path(__file__).parents[1]
FINDINGS = {*(f"C{n}" for n in range(1, 4)), *(f"H{n}" for n in range(1, 8)), *(f"M{n}" for n in range(1, 9)), *(f"L{n}" for n in range(1, 10))}  # fmt: skip


def missing(text: str) -> list[str]:
    """Tests that the tables name but that do not exist."""
    found = []
    for cell in re.findall(r"^\| [^|]+ \| (`.*`.*) \|$", text, re.M):
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", cell):
            path = TESTS / ("" if "/" in file else "attacks") / file
            held = path.read_text(encoding="utf-8") if path.exists() else ""
            found += [f"{file}: {name}" for name in re.findall(r"`(\w+)`", names) if f"def {name}(" not in held]  # fmt: skip
    return found


def test_every_finding_has_a_test():
    text = (TESTS / "attacks" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| ([CHML]\d) ", text, re.M)) == FINDINGS
    assert missing(text) == []
    assert missing("| C1 | `fuzz.py`: `test_not_there`, `test_nor_this` |") == ["fuzz.py: test_not_there", "fuzz.py: test_nor_this"]  # fmt: skip


def test_only_this_machine_is_attacked():
    with pytest.raises(OtherMachineError, match=r"192\.0\.2\.1"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(OtherMachineError):
        httpx.get("http://[2001:db8::1]/")


def test_an_honest_request_is_within_all_bounds(server: AttackedServer):
    with server.attack(seconds=60) as measured:
        assert server.ask(TEXT, {"prompt": "a", "max_tokens": 4}).status_code == 200
        time.sleep(0.3)
    measured.check()
    assert measured.probes


def test_one_server_at_a_time(server: AttackedServer):
    with pytest.raises(RuntimeError, match="one attacked server at a time"):
        AttackedServer()
    assert server.innocent() == server.expected


def test_gaps_are_measured_with_and_without_load(server: AttackedServer):
    begun = threading.Event()

    def nothing(over: threading.Event) -> None:
        begun.set()
        over.wait()

    gaps = server.gaps_beside(nothing, rounds=1, tokens=10)
    assert begun.is_set()
    assert len(gaps.alone) == len(gaps.beside) == 9


class Sleeper:
    """A process that the watcher treats like a server."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def kill(self) -> None:
        self.process.kill()

    def connection(self, timeout: float) -> socket.socket:
        raise ConnectionRefusedError


@pytest.mark.parametrize(
    ("seconds", "total_mib", "words"),
    [(0.2, 1000, "longer than its 0.2 s"), (60, -1000, "killed at -1000")],
)
def test_beyond_its_bounds_a_server_is_killed(seconds: float, total_mib: float, words: str):
    sleeper = Sleeper()
    with Watch(sleeper, seconds, total_mib) as measured:
        assert sleeper.process.wait(20) != 0
    assert words in measured.killed
    with pytest.raises(AssertionError, match=words):
        measured.check()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"http_mib": 600.0}, "HTTP process took 600"),
        ({"engine_mib": 600.0}, "engine took 600"),
        ({"probes": [0.1, 3.0]}, "probe took 3.00"),
        ({"probes": []}, "probe took inf"),
        ({"engine_replaced": True}, "engine was restarted"),
        ({"left": ["20 files became 90"]}, "became 90"),
        ({"innocent": "an innocent request failed"}, "innocent"),
    ],
)
def test_each_measure_can_fail(wrong: dict[str, object], words: str):
    Measured(probes=[0.1]).check()
    with pytest.raises(AssertionError, match=words):
        Measured(**{"probes": [0.1], **wrong}).check()
