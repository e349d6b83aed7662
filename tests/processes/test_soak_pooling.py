"""The soak of vectors itself: a short run passes, and it detects the vector of another text."""

from __future__ import annotations

import pytest
import soak_pooling
from server_process import Served


@pytest.mark.slow
def test_a_short_soak_of_vectors():
    with Served(soak_pooling.MODEL, *soak_pooling.FLAGS) as server:
        run, wrong, words = soak_pooling.soak_pooling(server, 15, 12, 7)
    assert not wrong, words
    for what in soak_pooling.KINDS:
        assert run.did[what] > 0


def test_the_soak_detects_the_vector_of_another_text():
    expected = {"a": b"1234", "b": b"5678"}
    run = soak_pooling.PoolingSoak("http://127.0.0.1:1", expected, 0, 0)  # type: ignore[arg-type]
    run.compare("list", ["a", "b"], [b"1234", b"5678"])
    assert not run.wrong
    run.compare("list", ["a", "b"], [b"1234", b"1234"])
    run.compare("list", ["a"], [])
    assert len(run.wrong) == 2
