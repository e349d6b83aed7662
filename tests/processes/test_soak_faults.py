"""The soak of faults itself: a short run passes, and it detects requests that fail without a fault, or in two engines."""

from __future__ import annotations

import pytest
import soak
import soak_faults
from server_process import Served
from soak_faults import Fault, FaultSoak

MOST_RESTARTS = {"QUIRE_MAX_ENGINE_RESTARTS": "1000"}


@pytest.mark.slow
@pytest.mark.parametrize("name", soak_faults.LAYOUTS)
def test_a_short_soak_of_faults(name: str):
    flags = soak_faults.LAYOUTS[name]
    engines = 2 if "--data-parallel-size" in flags else 1
    with Served(soak.MODEL, *soak_faults.FLAGS, *flags, env=MOST_RESTARTS) as server:
        run, wrong, words = soak_faults.soak_faults(server, engines, 20, 8, 7)
    assert not wrong, words
    assert run.did["answered"] > 0
    assert run.did["failed"] > 0


def test_the_soak_detects_what_a_fault_must_not_do():
    run = FaultSoak("http://127.0.0.1:1", {("/", "a"): [1, 2, 3, 4]}, 2, list, 0, 0)

    def check(tokens: list[int], failure: str, engine: int | None, fault: Fault | None) -> int:
        run.check("/", "a", 3, tokens, failure, engine, fault)
        return len(run.wrong)

    kill, pause = Fault("kill"), Fault("pause")
    assert check([1, 2, 3], "", 0, None) == 0
    assert check([1, 2], "lost", 0, kill) == check([], "lost", None, kill) == 0
    assert check([1, 2], "", 0, kill) == 1  # an end that is none
    assert check([1, 3], "lost", 0, kill) == 2
    assert check([1], "lost", 0, None) == 3
    assert check([1], "lost", 0, pause) == 4
    assert check([1], "lost", 1, kill) == 5  # the other engine, too
