"""CheckpointPool: which recurrent states are kept as copies, by the hash of the block that ends there.

Knows hashes and the places of copies. Does not know requests, tokens or tensors. Nothing owns a copy: the worker copies
it into a row before it computes the step, and overwrites it after a step, so a copy may be evicted at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The place of a copy, and the step that writes it."""

    slot: int
    step: int


class CheckpointPool:
    """Up to `size` checkpoints. The least recently used one is evicted; junctions after all others.

    A junction is where the prompts of several requests part: more requests can use it than a checkpoint at the end of
    one prompt.
    """

    def __init__(self, size: int):
        self.size = size
        self.free: list[int] = []
        self.ends: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        self.junctions: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self.reset()

    def __len__(self) -> int:
        return len(self.ends) + len(self.junctions)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self.ends or hash in self.junctions

    def use(self, hash: bytes) -> Checkpoint:
        """The checkpoint with this hash, which is now the most recently used. Raises KeyError: there is none."""
        found = self.junctions if hash in self.junctions else self.ends
        found.move_to_end(hash)
        return found[hash]

    def add(self, hash: bytes, step: int, junction: bool) -> Checkpoint:
        """A place for a new checkpoint, from now on under this hash; it may be the place of an evicted checkpoint."""
        if not self.free:
            _, evicted = (self.ends or self.junctions).popitem(last=False)
            self.free.append(evicted.slot)
        found = Checkpoint(self.free.pop(), step)
        (self.junctions if junction else self.ends)[hash] = found
        return found

    def forget(self, hash: bytes) -> None:
        """Make this checkpoint unfindable, if there is one."""
        for table in (self.ends, self.junctions):
            if (found := table.pop(hash, None)) is not None:
                self.free.append(found.slot)

    def reset(self) -> None:
        """Forget all."""
        self.ends.clear()
        self.junctions.clear()
        self.free = list(range(self.size - 1, -1, -1))
