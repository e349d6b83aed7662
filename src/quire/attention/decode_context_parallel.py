"""Decode context parallelism: blocks of the KV cache are split over ranks that would keep the same keys and values.

Knows which rank keeps a block, and the blocks that a step reads. Does not know how attention is computed: another backend does,
on the blocks of the step, which the ranks gather layer by layer. It sees the same keys in the same order as without ranks, so
results have the same bits; and all requests together have room for as many times more tokens as there are ranks.

    block of the pool     0  1  2  3  4  5        rank 0 keeps 0 2 4, as its blocks 1 2 3; rank 1 keeps 1 3 5
    a step reads          3  4                    each rank gives one block: the step's cache has places 0 (block 4) and 1 (block 3)

Block 0 of a rank's own cache is not the pool's: it fills up where another rank gives more blocks, and is never read.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E), N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.attention.kv_quantization import Part, as_bytes
from quire.forward_context import ForwardBatch
from quire.kvcache.specs import CacheSpec
from quire.parallel.ranks import RankGroup


@dataclass(slots=True)
class DecodeContextParallelMetadata:
    """Step metadata that the layers of a KV group share."""

    inner: Any  # of the backend that computes; blocks are places in the cache of the step
    own_N: Tensor  # this rank's blocks of the step; padded, so that all ranks give as many
    written_N: Tensor  # those that the step writes, and their places in the step's cache
    places_N: Tensor


def num_kept(num_blocks: int, ranks: int) -> int:
    """Blocks of each rank's own cache, if the pool has `num_blocks`."""
    return -(-num_blocks // ranks) + 1


class DecodeContextParallelAttention(AttentionBackend):
    """Computes with another backend.

    Args:
        backend: computes attention.
        ranks: those that keep a part of the blocks each.
        block_size: tokens of a block.
    """

    def __init__(self, backend: AttentionBackend, ranks: RankGroup, block_size: int):
        self.backend, self.ranks, self.block_size = backend, ranks, block_size
        self.can = backend.can

    def cache_parts(self, spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[Part, ...]:
        """The tensors of this rank's cache: `num_blocks` counts its own."""
        return self.backend.cache_parts(spec, num_blocks, block_size)

    def plan(self, batch: ForwardBatch, kv_group: int) -> DecodeContextParallelMetadata:
        size, rank = self.ranks.size, self.ranks.rank
        table_BM, slots_T = self._used(batch, kv_group), batch.slots[kv_group]
        # Ranks that compute parts of a step gather the blocks of the whole step.
        all_BM = table_BM if batch.whole is None else self._used(batch.whole, kv_group)
        block_T = torch.div(slots_T, self.block_size, rounding_mode="floor")
        blocks_N = torch.unique(torch.cat((block_T.new_zeros(1), all_BM.flatten(), block_T)))
        at_BM, at_T = (torch.searchsorted(blocks_N, named) for named in (table_BM, block_T))
        keeper_N = blocks_N % size
        # The i-th block of rank r in the step has place i * size + r, as the ranks give their blocks in turn.
        turn_N = torch.empty_like(blocks_N)
        for each in range(size):
            of_rank = keeper_N == each
            turn_N[of_rank] = torch.arange(int(of_rank.sum()))
        place_N, is_own = turn_N * size + keeper_N, keeper_N == rank
        kept_N = blocks_N // size + 1  # the block in its keeper's cache
        own_N = torch.zeros(int(turn_N.max()) + 1, dtype=torch.int64)
        own_N[: int(is_own.sum())] = kept_N[is_own]
        written_N = torch.unique(at_T)
        written_N = written_N[is_own[written_N]]
        tables, slots = list(batch.block_tables), list(batch.slots)
        tables[kv_group] = place_N[at_BM].int()
        slots[kv_group] = place_N[at_T] * self.block_size + slots_T % self.block_size
        inner = self.backend.plan(replace(batch, block_tables=tables, slots=slots), kv_group)
        return DecodeContextParallelMetadata(inner, own_N, kept_N[written_N], place_N[written_N])

    def _used(self, batch: ForwardBatch, kv_group: int) -> Tensor:
        """table_BM of the blocks that the rows have; the rest may be an earlier request's, and is 0."""
        table_BM = batch.block_tables[kv_group].long()
        num_blocks_B1 = -(-batch.lengths_B.long()[:, None] // self.block_size)
        return torch.where(torch.arange(table_BM.shape[1]) < num_blocks_B1, table_BM, 0)

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKE: Tensor | None,
        meta: DecodeContextParallelMetadata,
    ) -> Tensor:
        own: Sequence[Tensor] = spec.cache[:1] if spec.latent else spec.cache
        step = [self._gather(part, meta.own_N) for part in own]
        cache = (step[0], step[0][..., : spec.v_head_dim]) if spec.latent else tuple(step)
        o_THE = self.backend.attend(replace(spec, cache=cache), q_THD, k_TKD, v_TKE, meta.inner)
        if k_TKD is not None:
            for into, written in zip(own, step, strict=True):
                as_bytes(into)[meta.written_N] = as_bytes(written)[meta.places_N]
        return o_THE

    def _gather(self, part: Tensor, own_N: Tensor) -> Tensor:
        """The step's blocks of all ranks, by place."""
        given = part.view(torch.uint8).flatten(1)[own_N]
        return self.ranks.gather(given).view(-1, given.shape[1]).view(part.dtype).view(-1, *part.shape[1:])  # fmt: skip
