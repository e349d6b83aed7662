"""Random workloads with a tier are equal to a step-by-step reference, and nothing leaks."""

from __future__ import annotations

import pytest
from kv_tiers import tier_workload


def test_a_block_that_left_its_window_before_its_step_failed() -> None:
    """At depth 3: it stayed in the cache, and was saved."""
    tier_workload.main(1, 334)


@pytest.mark.slow
def test_outputs_equal_the_reference_while_steps_fail() -> None:
    counts = tier_workload.main(300, faulty=True)
    assert counts["kv_load_bytes:host"] > 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 150])
def test_outputs_equal_the_reference_and_nothing_leaks(first: int) -> None:
    counts = tier_workload.main(150, first)
    assert counts["external_prefix_cache_hits"] > 20
