"""What ranks make of draft tokens that differ: all take the same, whatever happens in one of them."""

from __future__ import annotations

from typing import Any

from quire.features.speculation.draft_sync import DraftSync
from tests.parallel.thread_ranks import ThreadRanks, on_ranks

PROPOSED = [
    {4: [7, 8, 9], 1: [5, 5], 2: [3]},
    {4: [7, 8, 1], 1: [5, 5, 6], 0: [2], 2: [3]},
    {4: [7, 8, 9], 1: [5], 0: [2], 2: [4]},
]
ROWS = [2, 4, 0, 1]
SECONDS = [(0.5, 0.002), (0.25, 0.003), (1.0, 0.004)]


def agreed(ranks: ThreadRanks) -> Any:
    agree = DraftSync(ranks, 3)
    return agree(SECONDS[ranks.rank], ROWS, PROPOSED[ranks.rank]), agree((1.0, 2.0), [], {})


def test_ranks_take_the_common_beginning_and_the_least_times() -> None:
    for (times, drafts), nothing in on_ranks(2, agreed):
        assert times == [0.25, 0.002]
        assert drafts == {4: [7, 8], 1: [5, 5], 2: [3]}
        assert nothing == ([1.0, 2.0], {})
    for (times, drafts), _ in on_ranks(3, agreed):
        assert times == [0.25, 0.002]
        assert drafts == {4: [7, 8], 1: [5]}
