"""ObservedBlockPool: a BlockPool that measures how long sampled blocks keep their content (--kv-cache-metrics).

Knows blocks and a clock. Does not know metrics: it reports counts by bucket, which never decrease.

    taken ---- in use ---- freed ........ idle ........ shared ---- in use ---- freed ...... idle ...... taken again
      `------------------------------------ lifetime -------------------------------------------------------'
                             `------ reuse gap ---------'                         `--- idle before evict ---'
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.kvcache.block_pool import BlockPool
from quire.protocol.bucket_counts import BucketCounts


@dataclass(slots=True)
class Stay:
    """One content of a block: when the block was allocated, and when a request last used it."""

    allocated_at: float
    last_used: float


class ObservedBlockPool(BlockPool):
    """Samples a `share` of all blocks that are allocated. Content that was never published is not counted."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        bounds: Sequence[float],
        share: float,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ):
        super().__init__(num_blocks, num_groups)
        self.watch_share, self.clock = share, clock
        self.draw = random.Random(seed)
        self.stays: dict[int, Stay] = {}
        self.lifetime, self.idle, self.gap = (BucketCounts(bounds) for _ in range(3))

    def allocate(self) -> int:
        block = super().allocate()
        self.stays.pop(block, None)
        if self.draw.random() < self.watch_share:
            now = self.clock()
            self.stays[block] = Stay(now, now)
        return block

    def share(self, block: int) -> None:
        if (stay := self.stays.get(block)) is not None and self.refs[block] == 0:
            now = self.clock()
            self.gap.add(now - stay.last_used)
            stay.last_used = now
        super().share(block)

    def release(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().release(blocks)
        for block in blocks:
            if (stay := self.stays.get(block)) is not None and self.refs[block] == 0:
                stay.last_used = self.clock()

    def forget(self, block: int) -> None:
        if block in self.hash_of and (stay := self.stays.pop(block, None)) is not None:
            now = self.clock()
            self.lifetime.add(now - stay.allocated_at)
            self.idle.add(now - stay.last_used)
        super().forget(block)

    def forget_all(self) -> None:
        super().forget_all()
        self.stays.clear()

    def stats(self) -> dict[str, list[float]]:
        return {"lifetime": self.lifetime.stats, "idle": self.idle.stats, "gap": self.gap.stats}
