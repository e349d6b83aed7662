"""RankAddress: how a worker finds the other ranks of its engine, on one machine. No torch here until `join`.

The ranks share a block of memory without a name: it is gone when the last process that maps it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from quire.errors import Unsupported
from quire.parallel.ranks import TensorRanks

SLOT = 1 << 20
"""Bytes that a rank hands over at once; larger parts go in several turns."""
HEADER = 128
"""Bytes of a rank's counters (ops/cpu/kernels/exchange.cpp)."""


class RankAddress(Struct, array_like=True):
    """`rank` of `size`, and the descriptor of the memory that they share."""

    rank: int = 0
    size: int = 1
    fd: int = -1

    def join(self) -> TensorRanks | None:
        """The exchange with the others; None: there are no others."""
        if self.size == 1:
            return None
        from quire.parallel.shared_memory import SharedMemoryRanks

        return SharedMemoryRanks(self.fd, self.rank, self.size)


@contextmanager
def addresses(size: int) -> Iterator[list[RankAddress]]:
    """Of all ranks. Child processes inherit the descriptor if they start inside.

    Raises:
        Unsupported: the operating system has no memory without a name.
    """
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several ranks on this operating system", "use Linux, or 1 rank")
    fd = os.memfd_create("quire-ranks", 0)
    try:
        os.ftruncate(fd, num_bytes(size))
        yield [RankAddress(rank, size, fd) for rank in range(size)]
    finally:
        os.close(fd)


def num_bytes(size: int) -> int:
    """Of the memory for so many ranks: their counters, and two slots of each."""
    return size * (HEADER + 2 * SLOT)
