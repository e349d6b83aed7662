"""A short run of the fuzzer on a real server; `make attack` sends ten thousand bodies."""

from __future__ import annotations

import pytest
from attacked_server import AttackedServer, note
from fuzz import bodies, fuzz, said


@pytest.mark.parametrize(
    ("count", "seed"), [(300, 1), pytest.param(10_000, 2, marks=pytest.mark.attack)]
)
def test_no_body_breaks_a_real_server(server: AttackedServer, count: int, seed: int):
    run = fuzz(server, count, seed, seconds=60 + count / 2)
    note(said(run))
    assert not run.wrong, "\n".join(run.wrong)


def test_the_bodies_are_the_same_again():
    assert list(bodies(3, 50)) == list(bodies(3, 50)) != list(bodies(4, 50))
