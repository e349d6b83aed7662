"""The exchange through shared memory."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.errors import RankLost
from quire.parallel.layout import RankLayout
from quire.parallel.rank_address import RankAddress, addresses, memory_bytes
from quire.parallel.regions import HEADER, SLOT, num_bytes
from quire.parallel.shared_memory import SharedMemoryGroup

SHAPES = [(1, 1), (3, 40), (1, SLOT), (5, SLOT // 3), (700, 4096), (0, 8), *[(1, 7)] * 200]


def part(rank: int, turn: int, rows: int, width: int) -> torch.Tensor:
    return (torch.arange(rows * width).view(rows, width) * (rank + 3) + turn).to(torch.uint8)


def joined(address: RankAddress, timeout_s: float = 60.0) -> SharedMemoryGroup:
    memory = mmap.mmap(address.fd, memory_bytes(address.layout))
    return SharedMemoryGroup(memory, 0, address.rank, address.layout.tensor, timeout_s)


def exchange(address: RankAddress) -> list[int]:
    """Gather tensors of all shapes; the turns that went wrong."""
    ranks = joined(address)
    wrong = []
    for turn, (rows, width) in enumerate(SHAPES):
        got = ranks.gather(part(address.rank, turn, rows, width))
        parts = [part(rank, turn, rows, width) for rank in range(ranks.size)]
        if not torch.equal(got, torch.cat(parts, -1)):
            wrong.append(turn)
    least = ranks.least([address.rank, -address.rank, 5])
    return wrong if least == [0, 1 - ranks.size, 5] else [-1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_all_parts(size: int) -> None:
    """Each thread maps the memory for itself, as a process does; the kernels run without Python's lock."""
    with addresses(RankLayout(tensor=size)) as found, ThreadPoolExecutor(size) as threads:
        assert list(threads.map(exchange, found)) == [[]] * size


def waiting(
    found: list[RankAddress], process: int = 0, timeout_s: float = 60.0
) -> SharedMemoryGroup:
    """Rank 0 of two; rank 1 is said to be in this process, and never comes."""
    ranks = joined(found[0], timeout_s)
    with mmap.mmap(found[0].fd, num_bytes(2)) as memory:
        struct.pack_into("i", memory, HEADER + 8, process)
    return ranks


def test_a_rank_that_does_not_come_is_named() -> None:
    with addresses(RankLayout(tensor=2)) as found:
        ranks = waiting(found, os.getpid(), timeout_s=0.5)
        began = time.thread_time()
        for _ in range(2):  # then at once
            with pytest.raises(
                RankLost, match=r"rank 0 of 2 waited for rank 1, which did not come within 0.5 s"
            ):
                ranks.gather(torch.zeros(2, 8))
        assert time.thread_time() - began < 0.3, "a rank that waits sleeps"


@pytest.mark.parametrize(
    ("number", "cause", "timeout_s"),
    [(signal.SIGKILL, "has ended", 60.0), (signal.SIGSTOP, "is stopped", 0.7)],
)
def test_a_rank_whose_process_has_ended_or_is_stopped(
    number: int, cause: str, timeout_s: float
) -> None:
    with addresses(RankLayout(tensor=2)) as found, subprocess.Popen(["sleep", "100"]) as process:
        try:
            process.send_signal(number)  # (nothing waits for it: it stays a zombie)
            with pytest.raises(RankLost, match=cause):
                waiting(found, process.pid, timeout_s).gather(torch.zeros(2, 8))
        finally:
            process.kill()


def test_a_row_that_fits_no_slot_is_refused() -> None:
    with addresses(RankLayout(tensor=2)) as found:
        ranks = joined(found[0])
        with pytest.raises(ValueError, match="does not fit"):
            ranks.gather(torch.zeros(1, SLOT + 1, dtype=torch.uint8))
