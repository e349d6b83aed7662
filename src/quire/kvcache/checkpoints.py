"""CheckpointPool: which recurrent states are kept as copies, by the hash of the block that ends there.

Knows hashes and the places of copies. Does not know requests, tokens or tensors. Nothing owns a copy: the worker copies
it into a row before it computes the step, and overwrites it after a step, so a copy may be evicted at any time.

    add                 a step of this engine writes the state: it can be found at once, since later steps run later
    reserve, publish    several plans write it, from outside: it can be found when the last of them is made
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The place of a copy, and the step that writes it (the last one, if there are several)."""

    slot: int
    step: int


class CheckpointListener(Protocol):
    """Hears which states can be found. It must not change the pool."""

    def on_add(self, hash: bytes, found: Checkpoint) -> None:
        """A step that is not planned yet computes this state."""
        ...

    def on_use(self, hash: bytes, found: Checkpoint) -> None:
        """The plan that is being made continues from this state."""
        ...

    def on_forget(self, hash: bytes, found: Checkpoint, is_evicted: bool) -> None:
        """The state cannot be found any more. `is_evicted`: it is right, and the plan that is being made overwrites it, or a later one;
        else it may be wrong."""
        ...


class CheckpointPool:
    """Up to `size` checkpoints. The least recently used one is evicted; junctions after all others.

    A junction is where the prompts of several requests part: more requests can use it than a checkpoint at the end of
    one prompt.
    """

    def __init__(self, size: int):
        self.size = size
        self.free: list[int] = []
        self.reserved: set[int] = set()
        self.ends: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        self.junctions: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self.listeners: list[CheckpointListener] = []
        self.reset()

    def __len__(self) -> int:
        return len(self.ends) + len(self.junctions)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self.ends or hash in self.junctions

    def find(self, hash: bytes) -> Checkpoint | None:
        return self.ends.get(hash) or self.junctions.get(hash)

    def use(self, hash: bytes) -> Checkpoint:
        """The checkpoint with this hash, which is now the most recently used. Raises KeyError: there is none."""
        table = self.junctions if hash in self.junctions else self.ends
        table.move_to_end(hash)
        for listener in self.listeners:
            listener.on_use(hash, table[hash])
        return table[hash]

    def add(self, hash: bytes, step: int, junction: bool) -> Checkpoint | None:
        """A place for a new checkpoint, from now on under this hash; it may be the place of an evicted checkpoint. None: all places
        are reserved."""
        if (slot := self._take()) is None:
            return None
        found = Checkpoint(slot, step)
        (self.junctions if junction else self.ends)[hash] = found
        for listener in self.listeners:
            listener.on_add(hash, found)
        return found

    def _take(self) -> int | None:
        if not self.free:
            if not (table := self.ends or self.junctions):
                return None
            hash, evicted = table.popitem(last=False)
            self.free.append(evicted.slot)
            for listener in self.listeners:
                listener.on_forget(hash, evicted, is_evicted=True)
        return self.free.pop()

    def forget(self, hash: bytes) -> None:
        """Make this checkpoint unfindable, if there is one: its content is wrong."""
        for table in (self.ends, self.junctions):
            if (found := table.pop(hash, None)) is not None:
                self.free.append(found.slot)
                for listener in self.listeners:
                    listener.on_forget(hash, found, is_evicted=False)

    def reset(self) -> None:
        """Forget all. What is reserved stays reserved."""
        for hash in [*self.ends, *self.junctions]:
            self.forget(hash)
        self.free = [slot for slot in range(self.size - 1, -1, -1) if slot not in self.reserved]

    # -- states that come from outside ------------------------------------------------------------
    @property
    def can_reserve(self) -> bool:
        """Whether a place can be reserved: half of them stay for the states that are computed here."""
        return len(self.reserved) < max(self.size // 2, 1)

    def reserve(self) -> int | None:
        """A place that nobody finds. The plan that is being made may still read it, before it writes it."""
        if self.can_reserve and (slot := self._take()) is not None:
            self.reserved.add(slot)
            return slot
        return None

    def publish(self, hash: bytes, slot: int, step: int) -> None:
        """The state is in this reserved place after `step`, and can be found from now on."""
        self.reserved.remove(slot)
        if hash in self:
            self.free.append(slot)  # another request has computed or loaded it meanwhile
        else:
            self.ends[hash] = Checkpoint(slot, step)

    def give_back(self, slot: int) -> None:
        """The reserved place is not needed."""
        self.reserved.remove(slot)
        self.free.append(slot)
