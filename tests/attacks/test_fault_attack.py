"""Full disks, a dying engine, and what they leave behind (H2, M1, M5, M6, L6)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attacked_server import TEXT, AttackedServer, note, together
from conftest import Start
from server_process import family
from test_request_attack import healed, outcome

SECRET = "sk-0123456789-of-the-attacks"


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory, of `size` bytes."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs the right to mount one")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), open(place / "full", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)
    with contextlib.suppress(OSError), open(place / "full", "ab", buffering=0) as file:
        while True:
            file.write(b"x")


@pytest.mark.attack
def test_a_full_temporary_directory_costs_the_recording_only(started: Start, tmp_path: Path):
    with small_disk(tmp_path / "t", "8m") as place:
        server = started(env={"TMPDIR": str(place)})
        fill(place)
        with server.attack(seconds=240) as measured:
            for _ in range(70):
                assert server.innocent() == server.expected
        measured.check()
        server.signal_engine(signal.SIGKILL)
        ended_or_healed(server)
        server.stop(signal.SIGTERM)


def ended_or_healed(server: AttackedServer, seconds: float = 90) -> None:
    """Raises if the server neither ends nor answers: /health must be 200 only if requests are or will be answered."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.process.poll() is not None:
            note("the server ended")
            return
        if outcome(server, TEXT, {"prompt": "a", "max_tokens": 1}, 10) == 200:
            note("the server healed")
            return
        time.sleep(0.5)
    with contextlib.suppress(httpx.HTTPError):
        assert server.client.get("/health").status_code != 200
    raise AssertionError("the server neither ended nor healed")


@pytest.mark.attack
def test_large_arguments_do_not_fill_a_small_disk(started: Start, tmp_path: Path):
    with small_disk(tmp_path / "t", "64m") as place:
        server = started(env={"TMPDIR": str(place)})
        body = {"prompt": "a", "n": 8, "max_tokens": 70, "temperature": 1, "ignore_eos": True}
        with server.attack(seconds=120) as measured:
            for size in (48 << 10, 3 << 20, 10 << 20):
                raw = json.dumps(body | {"vllm_xargs": {"a": "x" * size}}).encode()
                statuses = [outcome(server, TEXT, raw) for _ in range(2)]
                note(f"{size >> 10} KiB: {statuses}, {used_mib(place):.0f} MiB on the disk")
                assert set(statuses) <= {200, 400}
        measured.check()
        server.stop(signal.SIGTERM)


def used_mib(place: Path) -> float:
    left = shutil.disk_usage(place)
    return left.used / 2**20


@pytest.mark.attack
def test_a_temporary_directory_that_vanishes_does_not_silence_the_server(started: Start, tmp_path: Path):  # fmt: skip
    place = tmp_path / "t"
    place.mkdir()
    server = started(env={"TMPDIR": str(place)})
    for own in place.glob("quire-*"):
        shutil.rmtree(own)
    for _ in range(100):
        if outcome(server, TEXT, {"prompt": "a", "max_tokens": 4}, 10) != 200:
            break
    with contextlib.suppress(StopIteration):
        server.signal_engine(signal.SIGKILL)
    ended_or_healed(server)


@pytest.mark.attack
def test_deaths_of_the_engine_do_not_end_the_service(started: Start):
    """Six in a row; each running request gets an error without details."""
    server = started()
    for number in range(6):
        found: list[str] = []

        def ask(_: int, found: list[str] = found, prompt: str = f"tale {number}") -> None:
            body = {"prompt": prompt, "max_tokens": 1900, "ignore_eos": True}
            found.append(server.ask(TEXT, body, 60).text)

        asked = [lambda _: ask(0), lambda _: kill(server)]
        together(2, lambda at, asked=asked: asked[at](at), 90)
        note(f"death {number + 1}: {found[0][:200] if found else 'no answer'}")
        assert found
        assert "Errno" not in found[0]
        assert "Error:" not in found[0]
        assert healed(server, 120), server.output[-3000:]


def kill(server: AttackedServer) -> None:
    time.sleep(1.0)
    server.signal_engine(signal.SIGKILL)


@pytest.mark.attack
def test_no_secret_is_written_to_a_disk(started: Start, tmp_path: Path):
    place, cache = tmp_path / "t", tmp_path / "cache"
    place.mkdir()
    real = Path(os.environ.get("QUIRE_CACHE_ROOT", "~/.cache/quire")).expanduser()
    shutil.copytree(real, cache, symlinks=True, ignore=shutil.ignore_patterns("crashes"))
    env = {"TMPDIR": str(place), "QUIRE_CACHE_ROOT": str(cache), "HF_TOKEN": "hf_" + SECRET}
    server = started("--api-key", SECRET, "--hf-token", "hf_" + SECRET, env=env, key=SECRET)
    server.signal_engine(signal.SIGKILL)
    assert healed(server)
    files = [path for root in (place, cache) for path in root.rglob("*") if path.is_file()]
    assert [path for path in files if path.name == "resolved"]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.attack
def test_leftovers_of_a_killed_server_are_removed(started: Start, tmp_path: Path):
    place = tmp_path / "t"
    place.mkdir()
    env = {"TMPDIR": str(place)}
    first = started(env=env)
    pids = family(first.process.pid)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids[1:]):
        time.sleep(0.1)
    assert not [pid for pid in pids[1:] if Path(f"/proc/{pid}").exists()]
    left = set(place.glob("quire-*"))
    started(env=env)
    assert not left & set(place.glob("quire-*"))


@pytest.mark.attack
@pytest.mark.usefixtures("sighup_ends")
def test_a_closed_terminal_ends_the_server(started: Start):
    server = started()
    pids = family(server.process.pid)
    server.process.send_signal(signal.SIGHUP)
    server.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
