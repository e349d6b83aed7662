"""A random test is worth what it catches: each rule of the middle room is broken once, and must be noticed."""

from __future__ import annotations

import mutations
import pytest


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    caught = mutations.survives(name)
    assert caught, f"{name}: {mutations.TRIALS} random workloads did not notice"
