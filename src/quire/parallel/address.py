"""RankAddress: how a worker finds the other ranks of its engine, on one machine. No torch here until `join`.

Ranks that split layers share a block of memory without a name: it is gone when the last process that maps it ends. It has
one region for each group. Stages are connected by pairs of sockets without a name.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from msgspec import Struct, field

from quire.errors import Unsupported
from quire.parallel.layout import ONE_RANK, RankLayout, RankPlace
from quire.parallel.ranks import Ranks, TensorRanks
from quire.parallel.stages import StageLink

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


class RankAddress(Struct, array_like=True):
    """A rank's number in the layout, and the descriptors of what it shares with others."""

    rank: int = 0
    layout: RankLayout = ONE_RANK
    fd: int = -1
    sockets: StageSocketFds = field(default_factory=StageSocketFds)

    @property
    def place(self) -> RankPlace:
        return self.layout.place(self.rank)

    @property
    def fds(self) -> list[int]:
        """The descriptors that its process must inherit."""
        sockets = self.sockets
        return [fd for fd in (self.fd, sockets.previous, sockets.next, *sockets.others) if fd >= 0]

    def join(self) -> Ranks:
        """The exchanges with the others. It takes over the descriptors."""
        layout, place = self.layout, self.place
        tensor = context = None
        if self.fd >= 0:
            memory = mmap.mmap(self.fd, memory_bytes(layout))
            os.close(self.fd)
            number = place.stage * layout.prefill + place.part
            begin = number * num_bytes(layout.tensor)
            tensor = _shared(memory, begin, place.tensor, layout.tensor)
            number = place.stage * layout.tensor + place.tensor
            begin = _tensor_bytes(layout) + number * num_bytes(layout.prefill)
            context = _shared(memory, begin, place.part, layout.prefill)
        return Ranks(place, layout, tensor, context, self._stages())

    def _stages(self) -> StageLink | None:
        if self.layout.pipeline == 1:
            return None
        from quire.parallel.stage_sockets import StageSockets

        return StageSockets(self.place.stage, self.layout.pipeline, self.sockets)


def _shared(memory: mmap.mmap, begin: int, rank: int, size: int) -> TensorRanks | None:
    if size == 1:
        return None
    from quire.parallel.shared_memory import SharedMemoryRanks

    return SharedMemoryRanks(memory, begin, rank, size)


@contextmanager
def addresses(layout: RankLayout) -> Iterator[list[RankAddress]]:
    """Of all ranks. Child processes inherit the descriptors if they start inside.

    Raises:
        Unsupported: the operating system has no memory without a name.
    """
    with ExitStack() as stack:
        fd = -1
        if total := memory_bytes(layout):
            if not hasattr(os, "memfd_create"):
                raise Unsupported("several ranks on this operating system", "use Linux, or 1 rank")
            fd = os.memfd_create("quire-ranks", 0)
            stack.callback(os.close, fd)
            os.ftruncate(fd, total)
        sockets = [StageSocketFds(others=[]) for _ in range(layout.size)]
        for first in range(layout.prefill * layout.tensor):
            _connect([sockets[rank] for rank in layout.stage_group(first)], stack)
        yield [RankAddress(rank, layout, fd, sockets[rank]) for rank in range(layout.size)]


def _connect(stages: list[StageSocketFds], stack: ExitStack) -> None:
    """Each stage with the next one, and the last with all others."""

    def pair() -> tuple[int, int]:
        ends = socket.socketpair()
        for end in ends:
            stack.enter_context(end)
        return ends[0].fileno(), ends[1].fileno()

    for one, following in itertools.pairwise(stages):
        one.next, following.previous = pair()
        to_last, from_others = pair()
        one.others.append(to_last)
        stages[-1].others.append(from_others)


def memory_bytes(layout: RankLayout) -> int:
    """Of the memory for all groups of a layout; 0: no group has several ranks."""
    context = num_bytes(layout.prefill) * layout.pipeline * layout.tensor
    return _tensor_bytes(layout) + (context if layout.prefill > 1 else 0)


def _tensor_bytes(layout: RankLayout) -> int:
    groups = layout.pipeline * layout.prefill
    return num_bytes(layout.tensor) * groups if layout.tensor > 1 else 0


def num_bytes(size: int) -> int:
    """Of the region of one group of so many ranks: their counters, and two slots of each."""
    return size * (HEADER + 2 * SLOT)
