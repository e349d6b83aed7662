"""The random workloads detect every mutation: each breaks one rule of the scheduler or KV cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import mutations
import pytest
import workload

from quire.scheduler import output, scheduler
from tests.broken_rule import broken, mutated


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # the workloads preempt, and fail steps, on purpose
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert mutations.noticed(name), f"{mutations.TRIALS} random workloads did not notice"


@pytest.mark.slow
def test_afterwards_all_workloads_pass() -> None:
    """Else what they noticed was no mutation, or one of an earlier test."""
    workload.main(20)


def test_a_rule_is_broken_wherever_it_is_imported_and_only_meanwhile() -> None:
    whole = scheduler.output_of
    with broken("quire.scheduler.output", "output_of", "request.finish == 'stop'", "True"):
        assert scheduler.output_of is output.output_of is not whole
    assert scheduler.output_of is output.output_of is whole


def test_a_mutation_is_of_the_tree_and_not_of_its_text() -> None:
    source = (
        "class A:\n  def f(self, x):\n    y = (x\n      + 1)  # a comment\n    return max(y, 2)\n"
    )
    changed = mutated(source, "A.f", "x+1", "x")
    assert changed == mutated(source, "A.f", "y = ANY", "y = x")
    assert "y = x\n" in changed
    assert "return min(y, 2)" in mutated(source, "A.f", "max", "min")
    assert "pass" in mutated(source, "A.f", "y = x + 1", "")


@pytest.mark.parametrize(
    ("name", "before", "says"),
    [("A.f", "x + 2", "occurs 0 times"), ("A.f", "x", "occurs 2 times"), ("A.g", "x", "there is no A.g")],
)  # fmt: skip
def test_a_mutation_of_nothing_or_of_two_places_is_an_error(
    name: str, before: str, says: str
) -> None:
    with pytest.raises(LookupError, match=says):
        mutated("class A:\n  def f(self, x):\n    return x, -x\n", name, before, "1")
