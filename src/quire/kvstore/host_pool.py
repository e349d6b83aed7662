"""HostPool: which kept blocks are in slots of host memory, by name.

Knows names, slots and pins. Does not know what a slot contains. A block with a pin stays; of the others, the least recently used
one gives its slot up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.kvstore.disk import Key


class HostPool:
    """`slots`: the numbers of those that it may use."""

    def __init__(self, slots: Sequence[int]):
        self.num_slots = len(slots)
        self._free = list(reversed(slots))
        self._pinned: dict[Key, int] = {}
        self._idle: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._pins: dict[Key, int] = {}  # how many, also of names that are not here (yet)
        self._outdated: dict[
            Key, list[int]
        ] = {}  # what had pins when all was cleared: nobody finds it

    def __contains__(self, key: Key) -> bool:
        return key in self._pinned or key in self._idle

    def __len__(self) -> int:
        return len(self._pinned) + len(self._idle)

    @property
    def usage(self) -> float:
        """Which part of the slots has a block that somebody has pinned: the others are free for the next."""
        return len(self._pinned) / max(self.num_slots, 1)

    def slot(self, key: Key) -> int:
        """The slot of a block with a pin. Raises KeyError."""
        return self._pinned[key]

    def is_pinned(self, key: Key) -> bool:
        return key in self._pins

    def pin(self, key: Key) -> None:
        """If the block is here, or comes, it stays until `unpin`."""
        self._pins[key] = self._pins.get(key, 0) + 1
        if (slot := self._idle.pop(key, None)) is not None:
            self._pinned[key] = slot

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            if (slot := self._pinned.pop(key, None)) is not None:
                self._idle[key] = slot
            self._free += self._outdated.pop(key, ())

    def take(self) -> int | None:
        """A slot for a block that is not here yet; another block may be lost for it. None: all have pins."""
        if self._free:
            return self._free.pop()
        return self._idle.popitem(last=False)[1] if self._idle else None

    def add(self, key: Key, slot: int) -> None:
        """The slot, which was taken, has this block now."""
        if key in self:
            self.give_back(slot)
        elif key in self._pins:
            self._pinned[key] = slot
        else:
            self._idle[key] = slot

    def give_back(self, slot: int) -> None:
        """The slot, which was taken, has no block."""
        self._free.append(slot)

    def clear(self) -> None:
        """Lose all blocks. The slots of those with pins may still be read, and are free after the last `unpin`."""
        self._free += self._idle.values()
        self._idle.clear()
        for key, slot in self._pinned.items():
            self._outdated.setdefault(key, []).append(slot)
        self._pinned.clear()
