"""The soak of sound itself: a short run passes, and it detects the tokens of another sound."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import Served

soak_sound = pytest.importorskip("soak_sound", exc_type=ImportError)


@pytest.mark.slow
def test_a_short_soak_of_sound(tmp_path: Path):
    path = soak_sound.make_checkpoint(soak_sound.KIND, tmp_path)
    with Served(path, *soak_sound.FLAGS) as server:
        run, wrong, words = soak_sound.soak_sound(server, 15, 12, 7)
    assert not wrong, words
    for what in soak_sound.KINDS:
        assert run.did[what] > 0


def test_the_soak_detects_the_tokens_of_another_sound():
    run = soak_sound.SoundSoak("http://127.0.0.1:1", {"wav": [1, 2]}, 0, 0)
    run.compare("wav", [1, 2])
    assert not run.wrong
    run.compare("wav", [1, 3])
    assert len(run.wrong) == 1
