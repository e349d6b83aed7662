"""KeptPrefix: how much of a waiting request's prompt can be loaded from a store, after what the KV cache has.

Knows names, KV groups and checkpoints. Does not know plans or threads. A group without a window needs all blocks, a group with one
those of its window, and a model with recurrent states a state at the end: in the device's memory, or kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.features.kv_tiers.states import KeptStates
from quire.features.kv_tiers.swap import SwapSpace
from quire.kvcache.manager import KVManager
from quire.kvstore.disk import Key
from quire.kvstore.store_list import StoreList
from quire.scheduler.request import Request


class KeptPrefix:
    """See above. `group_bytes`: of a block, by KV group; a group without bytes only counts tokens."""

    def __init__(
        self, kv: KVManager, store: StoreList, swap: SwapSpace, states: KeptStates,
        group_bytes: Sequence[int],
    ):  # fmt: skip
        self.kv, self.store, self.swap, self.states = kv, store, swap, states
        self.groups = [group for group in kv.unbounded if group_bytes[group]]
        self.has_blocks = any(group_bytes)

    def end(self, request: Request, first: int, most: int) -> int:
        """After how many blocks the request can go on, if all that is kept is loaded; `first` of them are in the KV cache."""
        end = found = self._last_complete(request, first, most)
        while end > first and (usable := self._last_state(request, first, found, end)) < end:
            end = self._last_complete(request, first, max(usable, first))
        return end

    def _last_state(self, request: Request, first: int, num_found: int, end: int) -> int:
        """After how many of `end` blocks there is all that the request needs besides blocks."""
        usable = self.kv.usable(request, num_found if self.has_blocks else first, end)
        if usable < end:
            return self.states.last_kept(request.hashes, max(usable, first), end)
        return usable

    def _last_complete(self, request: Request, first: int, most: int) -> int:
        """The end of the longest run of blocks after the first `first` of which all is kept that is needed."""
        end, groups = first, self.groups
        while end < most and all(self.has((group, request.hashes[end])) for group in groups):
            end += 1
        while end > first:
            gaps = [self._last_gap(request, group, first, end) for group, _ in self.kv.windows]
            if (gap := min((gap for gap in gaps if gap >= 0), default=-1)) < 0:
                break
            end = gap
        return end

    def _last_gap(self, request: Request, group: int, first: int, end: int) -> int:
        """The last missing block of a group with a window that the token after `end` blocks needs; -1: none is missing."""
        spec, size = dict(self.kv.windows)[group], self.kv.block_size
        for index in range(end - 1, max(first, spec.first_needed(end * size) // size) - 1, -1):
            if not self.has((group, request.hashes[index])):
                return index
        return -1

    def has(self, key: Key) -> bool:
        return key in self.swap.pool or key in self.store
