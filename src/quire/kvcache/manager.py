"""KVManager: which request has which blocks, in every KV group.

Knows requests, groups and blocks. Does not know rows, budgets or which requests run next.

A request's blocks, in one group with a window (`.` is the null block: the real block was already released):

    blocks    [ .  .  .  7  4  9  5 ]        index i has tokens i*block_size ... (i+1)*block_size - 1
                        ^first needed ^capacity
    tokens    |-- published --|-- computed --|-- room --|

A request's block lists have the same length in all groups of tokens, so one number, `capacity`, says how many tokens fit.
Groups of cross attention come last. Their lists are as long as the encoder's states need, and never grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.kvcache.block_hash import Hasher
from quire.kvcache.block_pool import NULL_BLOCK, BlockPool
from quire.kvcache.layout import max_blocks
from quire.kvcache.specs import CacheGroup, CrossAttentionSpec, WindowSpec
from quire.protocol.request import MediaItem


class CachedRequest(Protocol):
    """The fields of a request that the manager uses."""

    tokens: list[int]
    num_encoder_tokens: int
    num_computed_tokens: int
    blocks: list[list[int]]
    capacity: int
    hashes: list[bytes]
    root: bytes
    media: Sequence[MediaItem]
    num_published_blocks: int
    num_cached_blocks: int
    num_shared_tokens: int
    left_windows: dict[int, tuple[int, bytes]]


class PrefixLimit(Protocol):
    """What a request needs to continue after a cached prefix, besides its blocks."""

    def usable(self, request: Any, num_found: int, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks can be used. `num_found`: all blocks of the request in the cache."""
        ...

    def reset(self) -> None:
        """The cached blocks lose their content."""
        ...


# by group: blocks that already contain a prefix (null: outside the window)
Prefix = list[list[int]]


class KVManager:
    """Blocks for requests: match a prefix, grow, publish, release."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[CacheGroup],
        block_size: int,
        *,
        caching: bool = True,
        hasher: Hasher | None = None,
        limits: Sequence[PrefixLimit] = (),
    ):
        self.limits = limits
        self.pool, self.groups = pool, list(groups)
        self.block_size = block_size
        self.max_encoder_len = max(
            (g.spec.max_encoder_len for g in groups if isinstance(g.spec, CrossAttentionSpec)),
            default=0,
        )
        # With cross attention, keys and values of tokens depend on the encoder's states too, which no hash covers.
        self.caching = caching and not self.max_encoder_len
        self.hasher = hasher or Hasher(block_size)
        self.windows = [
            (g, group.spec) for g, group in enumerate(groups) if isinstance(group.spec, WindowSpec)
        ]
        self.unbounded = [
            g for g, group in enumerate(groups) if not isinstance(group.spec, WindowSpec)
        ]
        self.num_token_groups = sum(
            not isinstance(group.spec, CrossAttentionSpec) for group in groups
        )

    # -- sizes ----------------------------------------------------------------------------------
    @property
    def usage(self) -> float:
        return 1.0 - len(self.pool.free) / max(self.pool.usable, 1)

    def max_blocks(self, num_tokens: int, max_step_tokens: int, num_encoder_tokens: int = 0) -> int:
        """How many blocks a request of these sizes may have at once, over all groups."""
        sizes = num_tokens, max_step_tokens, num_encoder_tokens
        return max_blocks(self.groups, self.block_size, *sizes)

    # -- prefixes -------------------------------------------------------------------------------
    def match(self, request: CachedRequest) -> tuple[int, Prefix]:
        """(tokens, blocks by group) of the longest cached prefix; never the whole request.

        At least one token remains to be computed, since the request needs its logits.
        """
        nothing: Prefix = [[] for _ in self.groups]
        if not self.caching:
            return 0, nothing
        self.hasher.extend(request.hashes, request.root, request.tokens, request.media)
        max_blocks = (len(request.tokens) - 1) // self.block_size
        hashes = request.hashes[:max_blocks]
        cached_blocks = [self._cached_blocks(g, hashes) for g in range(len(self.groups))]
        count = found = self._longest_prefix(cached_blocks, max_blocks)
        while count and (usable := self.usable(request, found, count)) < count:
            count = self._longest_prefix(cached_blocks, usable)
        if not count:
            return 0, nothing
        blocks = [column[:count] for column in cached_blocks]
        for g, spec in self.windows:
            first = spec.first_needed(count * self.block_size) // self.block_size
            blocks[g][:first] = [NULL_BLOCK] * first
        return count * self.block_size, blocks

    def usable(self, request: CachedRequest, num_found: int, num_blocks: int) -> int:
        """How many of the request's first `num_blocks` blocks, of `num_found` with content, its other data allows for."""
        limits = (limit.usable(request, num_found, num_blocks) for limit in self.limits)
        return min(limits, default=num_blocks)

    def _cached_blocks(self, group: int, hashes: list[bytes]) -> list[int]:
        """The block of each hash, or the null block. For a group without a window the list ends at the first gap."""
        blocks = [self.pool.by_hash[group].get(hash, NULL_BLOCK) for hash in hashes]
        if group in self.unbounded and NULL_BLOCK in blocks:
            return blocks[: blocks.index(NULL_BLOCK)]
        return blocks

    def _longest_prefix(self, cached_blocks: list[list[int]], max_blocks: int) -> int:
        """The length in blocks of the longest prefix that every group has."""
        count = min([max_blocks, *(len(cached_blocks[g]) for g in self.unbounded)])
        while count:
            gaps = [self._last_gap(cached_blocks[g], spec, count) for g, spec in self.windows]
            if all(gap < 0 for gap in gaps):
                return count
            count = min(gap for gap in gaps if gap >= 0)  # try a prefix that ends before the gap
        return 0

    def _last_gap(self, blocks: list[int], spec: WindowSpec, count: int) -> int:
        """The last missing block that the token at position count * block_size needs; -1 if none is missing."""
        first = spec.first_needed(count * self.block_size) // self.block_size
        for index in range(count - 1, first - 1, -1):
            if blocks[index] == NULL_BLOCK:
                return index
        return -1

    # -- growing --------------------------------------------------------------------------------
    def admit(
        self,
        request: CachedRequest,
        prefix: Prefix,
        num_cached_tokens: int,
        num_tokens: int,
        num_loaded: int = 0,
    ) -> bool:
        """Share `prefix` and take blocks for the tokens after it: `num_loaded` whose KV is loaded, then `num_tokens` to compute.

        False (and no change) if they do not fit. Nothing is loaded where no token to compute attends to it.
        """
        start = num_cached_tokens + num_loaded
        num_blocks = -(-(start + num_tokens) // self.block_size)
        columns: Prefix = []
        num_new: list[int] = []
        for column, group in zip(prefix, self.groups, strict=True):
            if isinstance(group.spec, CrossAttentionSpec):
                columns.append([])
                num_new.append(-(-request.num_encoder_tokens // self.block_size))
                continue
            outside = group.spec.first_needed(start) // self.block_size
            kept = [NULL_BLOCK] * outside + column[outside:]
            columns.append(kept)
            num_new.append(num_blocks - len(kept))
        shared = [block for column in columns for block in column if block != NULL_BLOCK]
        idle = sum(self.pool.refs[block] == 0 for block in shared)
        if sum(num_new) > len(self.pool.free) - idle:
            return False
        for block in shared:
            self.pool.share(block)
        request.blocks = [
            column + self._allocate(count) for column, count in zip(columns, num_new, strict=True)
        ]
        request.capacity = len(request.blocks[0]) * self.block_size
        request.num_published_blocks = request.num_cached_blocks = (
            num_cached_tokens // self.block_size
        )
        return True

    def grow(
        self, request: CachedRequest, num_tokens: int, ahead: int = 0
    ) -> list[list[int]] | None:
        """Take the blocks that num_tokens more need and return them by group of tokens; None if there are too few.

        Blocks that left a window are released first, and stay released in any case. `ahead`: the number of further
        tokens that get blocks too, if these are free.
        """
        num_missing = request.num_computed_tokens + num_tokens - request.capacity
        num_blocks = max(-(-num_missing // self.block_size), 0)
        num_ahead = -(-(num_missing + ahead) // self.block_size)
        if num_ahead <= 0:
            return []
        if self.windows:
            self._leave_windows(request)
        if num_ahead * self.num_token_groups <= len(self.pool.free):
            num_blocks = num_ahead
        if num_blocks * self.num_token_groups > len(self.pool.free):
            return None
        new_blocks = [self._allocate(num_blocks) for _ in range(self.num_token_groups)]
        for column, new in zip(request.blocks, new_blocks, strict=False):
            column += new
        request.capacity += num_blocks * self.block_size
        return new_blocks

    def _allocate(self, count: int) -> list[int]:
        return [self.pool.allocate() for _ in range(count)]

    def _leave_windows(self, request: CachedRequest) -> None:
        # Steps in flight may still be undone, so the window ends at the last known token.
        position = min(request.num_computed_tokens, len(request.tokens) - 1)
        for g, spec in self.windows:
            column = request.blocks[g]
            for index in range(spec.first_needed(position) // self.block_size - 1, -1, -1):
                if (block := column[index]) == NULL_BLOCK:
                    break
                if (key := self.pool.hash_of.get(block)) is not None:
                    request.left_windows[block] = key  # its step may be in flight, and fail
                self.pool.release((block,))
                column[index] = NULL_BLOCK

    # -- sharing --------------------------------------------------------------------------------
    def publish(self, request: CachedRequest) -> None:
        """Publish the blocks whose tokens are known and whose KV is written or certain to be."""
        end = (request.num_published_blocks + 1) * self.block_size  # of the next block
        if request.num_computed_tokens < end or len(request.tokens) < end or not self.caching:
            return
        full = min(request.num_computed_tokens, len(request.tokens)) // self.block_size
        self.hasher.extend(request.hashes, request.root, request.tokens, request.media)
        for index in range(request.num_published_blocks, full):
            for g, column in enumerate(request.blocks):
                if column[index] != NULL_BLOCK:
                    self.pool.publish(g, column[index], request.hashes[index])
        request.num_published_blocks = full
        request.num_shared_tokens = full * self.block_size

    def retract(self, request: CachedRequest) -> set[int]:
        """Unpublish the blocks that this request published, because their KV is wrong. Returns all blocks that the request has computed, published or not."""
        start, end = request.num_cached_blocks, request.num_published_blocks
        blocks = {b for column in request.blocks for b in column[start:end]}
        wrong_blocks = self.retract_content(self.published_by(request))
        return (blocks | wrong_blocks) - {NULL_BLOCK}

    def published_by(self, request: CachedRequest) -> dict[int, tuple[int, bytes]]:
        """What this request published: (group, hash) by block."""
        hash_of = self.pool.hash_of
        start, end = request.num_cached_blocks, request.num_published_blocks
        columns = (column[start:end] for column in request.blocks)
        found = {b: hash_of[b] for column in columns for b in column if b in hash_of}
        if request.left_windows:
            own = set(request.hashes[start:end])
            left = request.left_windows.items()
            found |= {b: key for b, key in left if key[1] in own and hash_of.get(b) == key}
        return found

    def used_by(self, request: CachedRequest) -> set[int]:
        """The blocks that the tokens of this request attended to, and that still have this content."""
        hash_of = self.pool.hash_of
        left = (b for b, key in request.left_windows.items() if hash_of.get(b) == key)
        return {b for column in request.blocks for b in column}.union(left) - {NULL_BLOCK}

    def retract_content(self, content: Mapping[int, tuple[int, bytes]]) -> set[int]:
        """Unpublish blocks that still have this content, (group, hash) by block. Returns those blocks."""
        blocks = {b for b, key in content.items() if self.pool.hash_of.get(b) == key}
        for block in blocks:
            self.pool.forget(block)
        return blocks

    def release(self, request: CachedRequest) -> None:
        """Release all blocks, the last ones first, since the first ones are more likely to be shared."""
        for column in request.blocks:
            self.pool.release(reversed(column))
        request.blocks = [[] for _ in self.groups]
        request.capacity = request.num_published_blocks = request.num_cached_blocks = 0
        request.left_windows.clear()

    def reset(self) -> bool:
        """Forget all content that no request uses now. False if some is in use (and stays)."""
        for limit in self.limits:
            limit.reset()
        if len(self.pool.free) == self.pool.usable:
            self.pool.forget_all()
            return True
        for block in list(self.pool.free):
            self.pool.forget(block)
        return False
