"""BlockPool: which blocks are in use, which are free, and which content the free ones still have.

Knows reference counts and content hashes. Does not know requests, tokens or layers.

    in use    refs > 0
    free      refs = 0, in the order in which they are taken again: first the unpublished blocks, the last freed
              before the others (its memory is warm, and no request can reuse its content); then the published
              blocks, least recently freed first, which requests can share again until they are taken

Block 0 is the null block: it has no owner, and what is written to it is never read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

NULL_BLOCK = 0


class BlockListener(Protocol):
    """Hears which content can be found in which block. It must not change the pool."""

    def on_publish(self, group: int, block: int, hash: bytes) -> None:
        """The block can be found by this hash; a step that is not planned yet may still have to write it."""
        ...

    def on_forget(self, group: int, block: int, hash: bytes) -> None:
        """The block cannot be found any more: it is taken for other content, or its content is wrong."""
        ...


class BlockPool:
    """`num_blocks` counts the null block, so num_blocks - 1 can be used.

    A hash is looked up within a group, because the same tokens have other keys and values in other layers.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1):
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.hash_of: dict[int, tuple[int, bytes]] = {}
        self.listeners: list[BlockListener] = []

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self) -> int:
        """Take the first free block. Its old content can no longer be found."""
        block, _ = self.free.popitem(last=False)
        self.forget(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner to a block with the content that the caller needs."""
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner of each block; null blocks are skipped."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if block not in self.hash_of:
                    self.free.move_to_end(block, last=False)

    def find(self, group: int, hash: bytes) -> int | None:
        return self.by_hash[group].get(hash)

    def publish(self, group: int, block: int, hash: bytes) -> bool:
        """Make this block findable by its hash. False if it is already, or if another block has the same content."""
        if block in self.hash_of or hash in self.by_hash[group]:
            return False
        self.by_hash[group][hash] = block
        self.hash_of[block] = (group, hash)
        for listener in self.listeners:
            listener.on_publish(group, block, hash)
        return True

    def forget(self, block: int) -> None:
        """Make this block's content unfindable."""
        if (key := self.hash_of.pop(block, None)) is not None:
            group, hash = key
            del self.by_hash[group][hash]
            for listener in self.listeners:
                listener.on_forget(group, block, hash)

    def forget_all(self) -> None:
        for block in list(self.hash_of):
            BlockPool.forget(self, block)

    def stats(self) -> dict[str, list[float]]:
        """Measured block lifetimes (`block_metrics.py`); empty here."""
        return {}

    def check(self) -> None:
        """Check that every block is either free or owned, and that both hash tables agree."""
        owned = sum(refs > 0 for refs in self.refs)
        if min(self.refs) < 0 or self.refs[NULL_BLOCK] or owned + len(self.free) != self.usable:
            raise RuntimeError(
                f"block pool: {owned} owned + {len(self.free)} free != {self.usable}"
            )
        if any(self.refs[block] for block in self.free):
            raise RuntimeError("block pool: a free block is owned")
        if sum(map(len, self.by_hash)) != len(self.hash_of):
            raise RuntimeError("block pool: a content hash has no block")
