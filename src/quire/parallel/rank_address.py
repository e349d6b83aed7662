"""RankAddress: how a worker finds the other ranks of its engine. No torch here until `join`.

Ranks that split layers share a block of memory without a name: it is gone when the last process that maps it ends. It has
one region for each group. Stages are connected by pairs of sockets without a name.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from msgspec import Struct, field

from quire.errors import Unsupported
from quire.parallel.layout import ONE_RANK, RankLayout, RankPlace
from quire.parallel.multi_node import Machines
from quire.parallel.ranks import RankGroup, RankGroups
from quire.parallel.regions import StageSocketFds, num_bytes
from quire.parallel.stages import StageLink

GROUPS: dict[str, Callable[[RankLayout, int], list[int]]] = {
    "layers": RankLayout.tensor_group,
    "context": RankLayout.context_group,
    "blocks": RankLayout.blocks_group,
}
"""By kind: the ranks that exchange with a rank, itself among them."""


class RankAddress(Struct, array_like=True):
    """A rank's number in the layout, the descriptors of what it shares with ranks of its machine, and how it finds ranks
    of other machines; None: there are no other machines."""

    rank: int = 0
    layout: RankLayout = ONE_RANK
    fd: int = -1
    sockets: StageSocketFds = field(default_factory=StageSocketFds)
    machines: Machines | None = None

    @property
    def place(self) -> RankPlace:
        return self.layout.place(self.rank)

    @property
    def fds(self) -> list[int]:
        """The descriptors that its process must inherit."""
        sockets = self.sockets
        return [fd for fd in (self.fd, sockets.previous, sockets.next, *sockets.others) if fd >= 0]

    @property
    def local(self) -> tuple[int, int]:
        """The rank's number among the ranks of its machine, and their number."""
        if self.machines is None:
            return self.rank, self.layout.size
        return self.machines.place(self.rank)

    def join(self) -> RankGroups:
        """The exchanges with the others. It takes over the descriptors.

        Raises:
            RankLost, StartupError: ranks of other machines did not come in time.
        """
        memory = None
        if self.fd >= 0:
            memory = mmap.mmap(self.fd, memory_bytes(self.layout))
            os.close(self.fd)
        store = None if self.machines is None else self.machines.meet()
        tensor, context, blocks = (self._exchange(kind, memory, store) for kind in GROUPS)
        return RankGroups(self.place, self.layout, tensor, context, self._stages(store), blocks)

    def _exchange(self, kind: str, memory: mmap.mmap | None, store: Any) -> RankGroup | None:
        """With a group of ranks: through memory on one machine, by gloo between machines."""
        group = GROUPS[kind](self.layout, self.rank)
        if len(group) == 1:
            return None
        if self.machines is not None and (memory is None or self.machines.spans(group)):
            return self.machines.group(store, f"{kind} {group}", group, self.rank)
        from quire.parallel.shared_memory import SharedMemoryGroup

        if memory is None:
            raise ValueError("ranks without memory that they share")
        begin = _regions(self.layout)[0][kind, tuple(group)]
        return SharedMemoryGroup(memory, begin, group.index(self.rank), len(group))

    def _stages(self, store: Any) -> StageLink | None:
        if self.layout.pipeline == 1:
            return None
        from quire.parallel.stage_sockets import StageSockets

        place = self.place.stage, self.layout.pipeline
        if self.machines is None:
            return StageSockets(*place, self.sockets)
        fds = self._far_sockets(self.machines, store)
        return StageSockets(*place, fds, look=self.machines.look)

    def _far_sockets(self, machines: Machines, store: Any) -> StageSocketFds:
        """Sockets to the other stages, as `_connect` makes them on one machine."""
        columns = [self.layout.stage_group(first) for first in range(self.layout.size // self.layout.pipeline)]  # fmt: skip
        pairs = [
            (f"{name} {one}", one, to)
            for stages in columns
            for one, following in itertools.pairwise(stages)
            for name, to in (("next", following), ("last", stages[-1]))
        ]
        found = machines.sockets(store, pairs, self.rank)
        own = self.layout.stage_group(self.rank)
        before = own[: own.index(self.rank)]
        others = own[:-1] if self.rank == own[-1] else [self.rank]
        return StageSocketFds(
            previous=found[f"next {before[-1]}"] if before else -1,
            next=found.get(f"next {self.rank}", -1),
            others=[found[f"last {one}"] for one in others],
        )


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
    return _regions(layout)[1]


def _regions(layout: RankLayout) -> tuple[dict[tuple[str, tuple[int, ...]], int], int]:
    """The first byte of the region of each group with several ranks, by kind and ranks; and the bytes of all regions."""
    begins: dict[tuple[str, tuple[int, ...]], int] = {}
    end = 0
    for kind, group_of in GROUPS.items():
        for group in sorted({tuple(group_of(layout, rank)) for rank in range(layout.size)}):
            if len(group) > 1:
                begins[kind, group] = end
                end += num_bytes(len(group))
    return begins, end
