"""The next server removes the folders of killed servers, and keeps the folders of running ones (M1)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.processes.run_folder import LOCK, hold, own_folder, remove_stale

HOLDS = """
import sys
from quire.processes.run_folder import hold, own_folder
folder = own_folder()
(folder / "flight-0").write_bytes(b"tokens of prompts")
lock = hold(folder)
print(folder, flush=True)
sys.stdin.read()
"""


def test_folders_of_killed_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        left = Path(child.stdout.readline().strip())
        mine = own_folder()
        lock = hold(mine)
        remove_stale(tmp_path)
        assert (left / "flight-0").exists(), "it still runs"
        child.kill()
        child.wait()
    remove_stale(tmp_path)
    assert not left.exists()
    assert mine.exists()
    assert lock is not None
    lock.close()


def test_other_folders_are_left_alone(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    for name, mode in (
        ("quire-old", 0o700),
        ("quire-open", 0o755),
        ("other", 0o700),
        ("elsewhere", 0o700),
    ):
        folder = tmp_path / name
        folder.mkdir(mode=mode)
        (folder / "kept").touch()
        if name != "quire-old":  # of a version without a lock
            (folder / LOCK).touch()
    (tmp_path / "quire-link").symlink_to(elsewhere)
    (tmp_path / "quire-file").touch()
    remove_stale(tmp_path)
    assert len(list(tmp_path.glob("*/kept"))) == 5  # a sixth, through the link


def test_kernels_of_a_killed_process_are_removed_after_an_hour(tmp_path: Path):
    """L13: a server that was killed while it compiled left them for ever."""
    old, new, shared = (tmp_path / f"quire-kernels-{name}" for name in ("old", "new", "shared"))
    for folder in (old, new, shared):
        folder.mkdir(mode=0o700)
        (folder / "avx2.so").touch()
    shared.chmod(0o777)
    for folder in (old, shared):
        os.utime(folder, (time.time() - 4000,) * 2)
    remove_stale(tmp_path)
    assert [folder.exists() for folder in (old, new, shared)] == [False, True, True]
