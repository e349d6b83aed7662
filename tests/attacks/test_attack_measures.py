"""The measures themselves: each bound is seen to be broken, and an honest request breaks none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from attacked import TEXT, AttackedServer, Measured, OtherMachineError, Watch


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


def test_gaps_are_measured_alone_and_beside(server: AttackedServer):
    begun = threading.Event()

    def nothing(over: threading.Event) -> None:
        begun.set()
        over.wait()

    gaps = server.gaps_beside(nothing, rounds=1, tokens=10)
    assert begun.is_set()
    assert len(gaps.alone) == len(gaps.beside) == 9


class Sleeper:
    """A process of which the watcher knows no more than of a server."""

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
        ({"engine_replaced": True}, "replaced"),
        ({"left": ["20 files became 90"]}, "became 90"),
        ({"innocent": "an innocent request failed"}, "innocent"),
    ],
)
def test_each_measure_can_fail(wrong: dict[str, object], words: str):
    Measured(probes=[0.1]).check()
    with pytest.raises(AssertionError, match=words):
        Measured(**{"probes": [0.1], **wrong}).check()
