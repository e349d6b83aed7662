"""The random workloads detect every mutation: each breaks one rule of the scheduler or KV cache."""

from __future__ import annotations

import mutations
import pytest


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    caught = mutations.survives(name)
    assert caught, f"{name}: {mutations.TRIALS} random workloads did not notice"


def test_without_a_mutation_all_workloads_pass() -> None:
    """Regression: every mutation was detected by a failed import."""
    assert mutations.survives(None, 200) is None


def test_a_mutation_is_of_the_tree_and_not_of_its_text() -> None:
    source = (
        "class A:\n  def f(self, x):\n    y = (x\n      + 1)  # a comment\n    return max(y, 2)\n"
    )
    changed = mutations.mutated(source, "A.f", "x+1", "x")
    assert changed == mutations.mutated(source, "A.f", "y = ANY", "y = x")
    assert "y = x\n" in changed
    assert "return min(y, 2)" in mutations.mutated(source, "A.f", "max", "min")
    assert "pass" in mutations.mutated(source, "A.f", "y = x + 1", "")


@pytest.mark.parametrize(
    ("name", "before", "says"),
    [("A.f", "x + 2", "occurs 0 times"), ("A.f", "x", "occurs 2 times"), ("A.g", "x", "there is no A.g")],
)  # fmt: skip
def test_a_mutation_of_nothing_or_of_two_places_is_an_error(
    name: str, before: str, says: str
) -> None:
    with pytest.raises(LookupError, match=says):
        mutations.mutated("class A:\n  def f(self, x):\n    return x, -x\n", name, before, "1")
