"""What ranks of one machine share: the sizes of a region of shared memory, and the descriptors of sockets between stages."""

from __future__ import annotations

from msgspec import Struct

SLOT = 1 << 20
"""Bytes that a rank hands over at once; larger parts go in several turns."""
HEADER = 128
"""Bytes of a rank's counters (ops/cpu/kernels/exchange.cpp)."""


class StageSocketFds(Struct, array_like=True):
    """Descriptors of the sockets between a rank and the same parts of other stages; -1: there is none.

    others: of the last stage, to each stage before it; of these, one to the last stage.
    """

    previous: int = -1
    next: int = -1
    others: list[int] = []


def num_bytes(size: int) -> int:
    """The bytes of one group's region with `size` ranks: a header and two slots for each rank."""
    return size * (HEADER + 2 * SLOT)
