"""The soaks of sound and pictures themselves: a short run passes, and they detect the tokens of another file."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import Served

soak_media = pytest.importorskip("soak_media", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "medium"), [("soak_sound", "SOUND"), ("soak_pictures", "PICTURES")])  # fmt: skip
def test_a_short_soak(module: str, medium: str, tmp_path: Path):
    found = getattr(pytest.importorskip(module, exc_type=ImportError), medium)
    with Served(found.make_checkpoint(tmp_path), *soak_media.FLAGS) as server:
        run, wrong, words = soak_media.soak_media(found, server, 15, 12, 7)
    assert not wrong, words
    for what in soak_media.KINDS:
        assert run.did[what] > 0


def test_the_soak_detects_the_tokens_of_another_file():
    run = soak_media.MediaSoak(None, "http://127.0.0.1:1", {"wav": [1, 2]}, 0, 0)
    run.compare("wav", [1, 2])
    assert not run.wrong
    run.compare("wav", [1, 3])
    assert len(run.wrong) == 1
