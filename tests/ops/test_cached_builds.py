"""Libraries of the cache directory: the choice, its log line, and the error if there is none."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.errors import ConfigError
from quire.ops.cpu import bindings, build, isa

PORTABLE = isa.ISAS[-1]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache's folder of kernels, with a compiler that writes what it is asked for."""
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "nothing")
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(build, "_run", lambda command: Path(command[-1]).write_bytes(b"code" * 99))
    return tmp_path / "kernels"


def refuse(command: list[str]) -> None:
    raise build.CannotBuild("it was compiled again")


@pytest.mark.parametrize("left", [0, 10, 64, 400, -1])
def test_a_truncated_library_is_rebuilt(
    left: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.library(PORTABLE)
    assert made.parent == cache
    whole = made.read_bytes()
    made.write_bytes(whole[:left])
    with monkeypatch.context() as patch:
        patch.setattr(build, "_run", refuse)
        with pytest.raises(build.CannotBuild, match="compiled again"):
            build.library(PORTABLE)
    assert build.library(PORTABLE) == made
    assert made.read_bytes() == whole
    monkeypatch.setattr(build, "_run", refuse)
    assert build.library(PORTABLE) == made
    assert [path.name for path in cache.iterdir()] == [made.name]


def test_a_changed_byte_is_detected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.library(PORTABLE)
    data = bytearray(made.read_bytes())
    data[7] ^= 1
    made.write_bytes(data)
    monkeypatch.setattr(build, "_run", refuse)
    with pytest.raises(build.CannotBuild, match="compiled again"):
        build.library(PORTABLE)


def test_what_a_killed_build_left_is_removed_and_a_running_build_stays(cache: Path) -> None:
    old, running = cache / f"{build.SCRATCH}old", cache / f"{build.SCRATCH}running"
    for folder in (old, running):
        folder.mkdir(parents=True)
        (folder / "gemm.o").write_bytes(b"code")
    os.utime(old, (1, 1))
    cache.chmod(0o700)
    made = build.library(PORTABLE)
    assert sorted(path.name for path in cache.iterdir()) == sorted([running.name, made.name])


def best() -> bindings.Kernels | None:
    return bindings.best.__wrapped__()


def test_each_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(name: str) -> bindings.Kernels:
        raise build.Missing("there is no compiler" if name != "portable" else "no libgomp")

    monkeypatch.setenv("QUIRE_CPU_ISA", "auto")
    monkeypatch.setattr(bindings, "load", load)
    monkeypatch.setattr(isa, "usable", lambda: [isa.ISAS[3], isa.ISAS[4], PORTABLE])
    assert best() is None
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "(avx512, avx2: there is no compiler; portable: no libgomp)" in line.getMessage()


@pytest.mark.parametrize(
    ("name", "says"), [("amx2", "unknown name"), ("amx", "this CPU cannot run it")]
)
def test_a_build_that_cannot_be_had_is_refused(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", name)
    monkeypatch.setattr(isa, "usable", lambda: [isa.ISAS[4], PORTABLE])
    with pytest.raises(ConfigError, match=f"CPU_ISA={name}: {says}; choose auto, avx2, portable, or none"):  # fmt: skip
        best()


def test_the_log_names_the_chosen_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    made = SimpleNamespace(threads=torch.get_num_threads)
    monkeypatch.setattr(bindings, "load", lambda name: made)
    with caplog.at_level(logging.INFO):
        assert best() is made
    assert "CPU kernels: portable" in caplog.text
    assert "do not follow torch's number of threads" not in caplog.text


def test_a_different_thread_pool_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("QUIRE_CPU_ISA", "portable")
    monkeypatch.setattr(bindings, "load", lambda name: SimpleNamespace(threads=lambda: before))
    best()
    assert "the kernels do not follow torch's number of threads" in caplog.text
    assert torch.get_num_threads() == before


def test_the_kernels_use_torchs_threads() -> None:
    if (found := bindings.best()) is None:
        pytest.skip("the native kernels do not run on this CPU")
    assert bindings.shares_threads(found.threads)


def other_user(monkeypatch: pytest.MonkeyPatch, *theirs: Path) -> None:
    """Files as if another user owned them; a test may not be root, who could make them so."""
    lstat = Path.lstat

    def seen(path: Path) -> os.stat_result:
        found = lstat(path)
        return os.stat_result((*found[:4], 65534, *found[5:])) if path in theirs else found

    monkeypatch.setattr(Path, "lstat", seen)


def planted(path: Path) -> bytes:
    """A library with a good seal: the seal has no key."""
    data = b"evil" * 99
    data += hashlib.sha256(data).digest()
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("how", ["another user's file", "anyone may write", "a link"])
def test_a_planted_library_is_not_loaded(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M4: a library of another user in a shared cache was loaded, and is code."""
    made = build.library(PORTABLE)
    evil = planted(made)
    if how == "another user's file":
        other_user(monkeypatch, made)
    elif how == "anyone may write":
        made.chmod(0o666)
    else:
        made.rename(cache / "elsewhere")
        made.symlink_to(cache / "elsewhere")
    monkeypatch.setattr(build, "_run", refuse)
    with pytest.raises(build.CannotBuild, match="compiled again"):
        build.library(PORTABLE)
    assert made.read_bytes() == evil


@pytest.mark.parametrize("how", ["another user's folder", "anyone may write", "another group"])
def test_folders_of_other_users_are_not_used(
    how: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = build.library(PORTABLE)
    planted(made)
    made.chmod(0o644)
    if how == "another user's folder":
        other_user(monkeypatch, cache.parent)
    else:
        cache.parent.chmod(0o777 if how == "anyone may write" else 0o775)
        if how == "another group":
            monkeypatch.setattr(os, "getegid", lambda: 4242)
    with caplog.at_level(logging.WARNING, "quire"):
        alone = build.library(PORTABLE)
    assert alone.parent.name.startswith(build.PRIVATE)
    assert alone.parent.stat().st_mode & 0o777 == 0o700
    assert b"evil" not in alone.read_bytes()
    assert "set QUIRE_CACHE_ROOT to a folder of this user" in caplog.text
    build.loaded(alone)
    assert not alone.parent.exists()
    build.loaded(made)
    assert made.exists()


def test_cached_libraries_are_private_under_any_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        made = build.library(PORTABLE)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mode & 0o777 == 0o755
    cache.parent.chmod(0o1777)  # as /tmp: each user's entries are theirs
    assert build.library(PORTABLE) == made


def test_a_library_without_the_kernels_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the start with an AttributeError."""

    def load(name: str) -> None:
        raise AttributeError("undefined symbol: quire_init")

    monkeypatch.setenv("QUIRE_CPU_ISA", "auto")
    monkeypatch.setattr(bindings, "load", load)
    bindings.best.cache_clear()
    try:
        assert bindings.best() is None
    finally:
        bindings.best.cache_clear()
