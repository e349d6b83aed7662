"""Converted models in the cache are used only if no other user can have written them (M6)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.models.converted_folder import converted_folder
from quire.ops.cpu import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    return tmp_path / "cache"


def converted(tmp_path: Path) -> Path:
    weights = tmp_path / "weights.gguf"
    if not weights.exists():
        weights.touch()
    texts = {"config.json": {"mine": True}}
    return Path(converted_folder("gguf", "m", [weights], lambda: texts, {"model.gguf": weights}))


def test_a_folder_is_made_once_and_private(cache: Path, tmp_path: Path):
    made = converted(tmp_path)
    assert made.parent == cache / "gguf"
    assert made.stat().st_mode & 0o777 == 0o700
    (made / "config.json").write_text("kept")
    assert converted(tmp_path) == made
    assert (made / "config.json").read_text() == "kept"


@pytest.mark.parametrize("how", ["another user's cache", "anyone may write"])
def test_a_cache_of_other_users_is_not_used(
    how: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planted = converted(tmp_path)
    (planted / "config.json").write_text("planted")
    if how == "anyone may write":
        (cache / "gguf").chmod(0o777)
    else:
        foreign = cache.stat().st_ino
        trusted = build._trusted
        monkeypatch.setattr(build, "_trusted", lambda found: found.st_ino != foreign and trusted(found))  # fmt: skip
    made = converted(tmp_path)
    assert made.parent == tmp_path / "tmp" / f"quire-converted-{os.geteuid()}" / "gguf"
    assert "mine" in (made / "config.json").read_text()
    assert converted(tmp_path) == made


@pytest.mark.parametrize("how", ["a folder of another user", "a link"])
def test_a_planted_folder_is_refused(
    how: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planted = converted(tmp_path)
    if how == "a link":
        planted.rename(tmp_path / "elsewhere")
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        foreign, trusted = planted.stat().st_ino, build._trusted
        monkeypatch.setattr(build, "_trusted", lambda found: found.st_ino != foreign and trusted(found))  # fmt: skip
    with pytest.raises(ConfigError, match="set QUIRE_CACHE_ROOT"):
        converted(tmp_path)
