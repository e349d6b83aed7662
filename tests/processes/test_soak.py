"""The soak test itself: a short run passes, and the soak detects leaks and wrong tokens."""

from __future__ import annotations

import pytest
import soak
from server_process import Served


@pytest.mark.slow
def test_a_short_soak():
    with Served(soak.MODEL, *soak.FLAGS) as server:
        run, wrong, words = soak.soak(server, seconds=20, clients=16, seed=7)
    assert not wrong, words
    for what in soak.KINDS:
        assert run.did[what] > 0


def test_the_soak_detects_wrong_tokens():
    run = soak.Soak("http://127.0.0.1:1", {("/", "a"): [1, 2, 3, 4]}, 0, 0)
    run.check("/", "a", 3, [1, 2, 3])
    assert not run.wrong
    run.check("/", "a", 3, [1, 2])
    run.check("/", "a", 3, [1, 5, 3])
    assert ["from 2 on" in run.wrong[0], "from 1 on" in run.wrong[1]] == [True, True]


def test_the_soak_detects_leaks():
    before = {"MiB": 400.0, "files": 40.0, "threads": 14.0, "processes": 4.0}
    assert (
        soak.leaks(before, {"MiB": 420.0, "files": 41.0, "threads": 15.0, "processes": 5.0}) == []
    )
    found = soak.leaks(
        before, {"MiB": 500.0, "files": 60.0, "threads": 17.0 + soak.POOL, "processes": 9.0}
    )
    assert [line.split()[-3] for line in found] == ["files", "threads", "MiB", "processes"]
