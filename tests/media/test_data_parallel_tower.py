"""Ranks that share the items of a pass, against one tower: the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from test_vision_towers import encoded, inputs_of, tower_of

from quire.features.media.data_parallel_tower import DataParallelTower, owners_of
from quire.features.media.item_encoder import Tower
from quire.protocol.media import TowerInput


class ThreadRank:
    """A rank among threads."""

    link = None

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: list[torch.Tensor]):
        self.rank, self.size, self.barrier, self.parts = rank, size, barrier, parts

    def gather(self, x_TW: torch.Tensor) -> torch.Tensor:
        self.parts[self.rank] = x_TW
        self.barrier.wait(20)
        found = torch.cat(self.parts, -1)
        self.barrier.wait(20)
        return found


class Counting:
    """Counts the items of a tower."""

    def __init__(self, tower: Tower):
        self.tower, self.count = tower, 0

    def encode(self, items: Sequence[TowerInput]) -> list[torch.Tensor]:
        self.count += len(items)
        return self.tower.encode(items)


def with_ranks(
    tower: Tower, size: int, items: Sequence[TowerInput], width: int
) -> tuple[list[list[torch.Tensor] | ValueError], list[int]]:
    """Encode the items with `size` ranks. Returns by rank (the rows that `encode` returned or its error, how many items the rank encoded)."""
    barrier, parts = threading.Barrier(size), [torch.empty(0)] * size
    towers = [Counting(tower) for _ in range(size)]
    found: list[list[torch.Tensor] | ValueError] = [[]] * size

    def run(rank: int) -> None:
        group = ThreadRank(rank, size, barrier, parts)
        place = torch.float32, torch.device("cpu")
        try:
            with torch.inference_mode():
                found[rank] = DataParallelTower(towers[rank], group, width, *place).encode(items)  # type: ignore[arg-type]
        except ValueError as fault:
            found[rank] = fault

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found, [one.count for one in towers]


@pytest.mark.parametrize(("count", "size"), [(4, 2), (3, 2), (1, 2), (2, 4)])
def test_ranks_that_share_items_get_the_rows_of_one_tower(
    count: int, size: int, checkpoint: Callable[[str], str]
) -> None:
    """Also if a rank has no item, and if the items cannot be shared evenly."""
    path = checkpoint("qwen2_5_vl")
    tower, items = tower_of(path), inputs_of(path)[:count]
    want = encoded(tower, items)
    for item, rows in zip(items, want, strict=True):
        item.runs = [(0, len(rows))]
    found, counts = with_ranks(tower, size, items, want[0].shape[1])
    assert sum(counts) == count
    assert max(counts) < count or count == 1
    for rows in found:
        assert isinstance(rows, list)
        assert all(map(torch.equal, rows, want))


def test_a_rank_that_fails_ends_the_pass_of_all(checkpoint: Callable[[str], str]) -> None:
    path = checkpoint("qwen2_5_vl")
    tower, items = tower_of(path), inputs_of(path)[:2]
    for item in items:
        item.runs = [(0, len(encoded(tower, [item])[0]))]
    items[1].tensors = {}
    found, _ = with_ranks(tower, 2, items, 64)
    assert all(isinstance(one, ValueError) for one in found)


def test_the_rank_with_the_fewest_rows_is_next() -> None:
    assert owners_of([5, 1, 9, 4], 2) == [1, 0, 0, 1]
    assert owners_of([], 3) == []
    assert owners_of([2], 3) == [0]
