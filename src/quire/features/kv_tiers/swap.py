"""SwapSpace: blocks of preempted requests, which stay in host memory until the requests have a row again, or end.

The blocks of a preempted request are free, and can be found in the cache until they are taken. So nothing is copied that stays
there: the plan that takes a block for other content copies it to a slot first. When the request is considered again, the blocks that
are not in the cache are loaded from the slots (`gate.py`), and the rest is computed. Slots are written and read by copies of
plans alone, in the order of the plans, so a slot may be taken again at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from quire.features.kv_tiers.pending import HOST, LoadCopy
from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvstore.disk import Key
from quire.kvstore.host_pool import HostPool
from quire.scheduler.request import Request

SWAPPED, USAGE, BYTES = "requests_swapped", "host_cache_usage", f"kv_tier_bytes:{HOST}"
LIMIT = f"kv_tier_limit:{HOST}"
"""Gauges, by their names in EngineStats.counts."""


class SwapSpace:
    """Knows requests, names and slots; the gate knows plans. Without slots it does nothing.

    by_hash: the blocks of the cache, by group.
    """

    def __init__(
        self,
        pool: HostPool,
        by_hash: Sequence[Mapping[bytes, int]],
        counts: dict[str, float],
        slot_bytes: int = 0,
    ):
        self.by_hash = by_hash
        self.pool, self.counts, self.slot_bytes = pool, counts, slot_bytes
        self.swapped: dict[Request, list[Key]] = {}
        self.leaving: dict[Key, int] = {}  # blocks that the next plan copies, because it takes some
        self.copying: set[Key] = set()  # by plans that are in flight
        self.written: OrderedDict[Key, int] = OrderedDict()  # by steps in flight: the step
        self.is_on = bool(pool.num_slots)
        self._measure()

    # -- requests ---------------------------------------------------------------------------------
    def preempted(self, request: Request) -> None:
        """The request has lost its row, and loses its blocks next."""
        if not self.is_on:
            return
        keys = [
            (group, request.hashes[index])
            for group, column in enumerate(request.blocks)
            for index, block in enumerate(column[: request.num_published_blocks])
            if block != NULL_BLOCK
        ]
        for key in keys:
            self.pool.pin(key)
        self.swapped[request] = keys
        self._measure()

    def returned(self, request: Request) -> None:
        """The request has a row again, or has ended."""
        for key in self.swapped.pop(request, ()):
            self.pool.unpin(key)
        self._measure()

    def load(self, request: Request, blocks: Sequence[tuple[int, int, bytes]]) -> list[LoadCopy]:
        """Of these blocks of the request (group, block, hash), the copies of those that are here. They get a pin each."""
        found = []
        for group, block, hash in blocks:
            if (key := (group, hash)) in self.pool:
                self.pool.pin(key)
                found.append(LoadCopy(self.pool.slot(key), key, block, request))
        return found

    # -- blocks -----------------------------------------------------------------------------------
    def on_written(self, request: Request, start: int, end: int, step: int) -> None:
        """This step, or an earlier one in flight, writes these blocks of the request."""
        for hash in request.hashes[start:end] if self.is_on else ():
            for group in range(len(request.blocks)):
                self.written[group, hash] = step
                self.written.move_to_end((group, hash))

    def settle(self, oldest: int) -> None:
        """All steps before this one are committed."""
        while self.written and next(iter(self.written.values())) < oldest:
            self.written.popitem(last=False)

    def on_taken(self, group: int, block: int, hash: bytes) -> None:
        """The next plan takes this block for other content. The blocks of other groups with the same tokens are of no use alone, so
        they are copied too. What a step in flight writes may turn out to be wrong."""
        blocks = {(g, hash): found for g, by in enumerate(self.by_hash) if (found := by.get(hash))}
        for key, found in {**blocks, (group, hash): block}.items():
            is_here = key in self.pool or key in self.copying
            if self.pool.is_pinned(key) and not is_here and key not in self.written:
                self.leaving.setdefault(key, found)

    def take_leaving(self) -> list[tuple[int, Key, int]]:
        """(slot, name, block) of what the next plan copies. What finds no slot is computed again."""
        leaving, self.leaving = self.leaving, {}
        found = []
        for key, block in leaving.items():
            if (slot := self.pool.take()) is not None:
                self.copying.add(key)
                found.append((slot, key, block))
        return found

    def copied(self, slot: int, key: Key, is_right: bool) -> None:
        """The copy to this slot has run."""
        self.copying.discard(key)
        if is_right:
            self.pool.add(key, slot)
        else:
            self.pool.give_back(slot)
        self._measure()

    def clear(self) -> None:
        """The cache has lost its content, since that is wrong now."""
        self.leaving.clear()
        self.written.clear()
        self.pool.clear()
        self._measure()

    def _measure(self) -> None:
        if not self.is_on:
            return
        self.counts[SWAPPED] = len(self.swapped)
        self.counts[USAGE] = self.pool.usage
        self.counts[BYTES] = len(self.pool) * self.slot_bytes
        self.counts[LIMIT] = self.pool.num_slots * self.slot_bytes
