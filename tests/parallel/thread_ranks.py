"""Ranks that are threads of one process, for tests: they exchange through a list and a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from quire.parallel.ranks import split_among


class ThreadRanks:
    """See `RankGroup` (parallel/ranks.py)."""

    link: int | None = None  # the kernels cannot exchange

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier):
        self.rank, self.size = rank, size
        self.slots, self.barrier = slots, barrier
        self.gathered: list[int] = []  # bytes of each exchange

    def gather(self, x_TW: Tensor) -> Tensor:
        self.gathered.append(x_TW.nbytes)
        self.slots[self.rank] = x_TW
        self.barrier.wait()
        found = torch.cat(self.slots, -1)
        self.barrier.wait()
        return found

    def check(self) -> None:
        """Nothing: a rank that does not come breaks the barrier."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        found: list[int] = self.gather(torch.tensor([numbers])).view(self.size, -1).amin(0).tolist()
        return found


def on_ranks(size: int, run: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank's call gives; all run at once."""
    slots, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def guarded(rank: int) -> Any:
        try:
            return run(ThreadRanks(rank, size, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(copy_context().run, guarded, rank) for rank in range(size)]
        return [future.result() for future in futures]


def check_bits(sizes: Sequence[int], run: Callable[[ThreadRanks], list[Tensor]], wanted: list[Tensor]) -> None:  # fmt: skip
    """Every rank of each number of ranks gives these tensors, bit for bit."""
    for size in sizes:
        for found in on_ranks(size, run):
            assert len(found) == len(wanted)
            assert all(map(torch.equal, found, wanted))


LOADING = threading.Lock()


def load_on(ranks: ThreadRanks, load: Callable[[], Any]) -> Any:
    """What `load` gives as this rank's part. One rank loads at a time, and none runs meanwhile: the default dtype is the process's."""
    with LOADING, split_among(ranks):
        found = load()
    ranks.least([0])
    ranks.gathered.clear()
    return found
