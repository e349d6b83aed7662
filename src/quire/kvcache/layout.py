"""CacheLayout: from the cache spec of each layer to KV groups that share one pool of blocks.

Knows specs, groups and bytes. Does not know tensors: `worker/kv_cache.py` allocates them from this layout.

Layers that keep the same tokens are of one kind. With one kind there is one group. With several (say 22 windows and 4
full), the layers of each kind are divided into groups of equal size, so that a block id means the same bytes in every
group:

    storage tensor 0    [blocks]   layer 0 of group A, layer 0 of group B, layer 0 of group C
    storage tensor 1    [blocks]   layer 1 of group A, layer 1 of group B, ...

While group A uses a block, B does not, so two layers never use the same memory at once. Layers whose keys and
values have other sizes (of a draft model, for example) get storage of their own; then a block id costs memory in both
storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from quire.kvcache.specs import CacheGroup, CacheSpec, CrossAttentionSpec, WindowSpec


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the KV cache of a worker's models is divided."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    bytes_per_block: int
    """Bytes of one block id: the sum of its parts in all storage tensors."""

    def blocks_for(self, num_tokens: int, max_step_tokens: int) -> int:
        return max_blocks(self.groups, self.block_size, num_tokens, max_step_tokens)

    def tokens_in(self, num_blocks: int, length: int, max_step_tokens: int) -> int:
        """How many tokens fit in num_blocks, for requests of `length` tokens (a window needs only its own)."""
        return int(num_blocks / self.blocks_for(length, max_step_tokens) * length)

    def divided(self, ranks: int) -> CacheLayout:
        """The same, where each of several ranks keeps a part of the blocks, and gathers the blocks of a layer that a step reads."""
        num_layers = max(len(group.layers) for group in self.groups) or 1
        own_bytes = -(-self.bytes_per_block // ranks)
        gathered = -(-(self.bytes_per_block + own_bytes) // num_layers)
        return replace(self, bytes_per_block=own_bytes + gathered)

    def of_layers(self, own: range) -> CacheLayout:
        """The same groups with only these layers, numbered from 0: what a stage of a pipeline keeps of a request."""
        groups = []
        for group in self.groups:
            pairs = [
                each for each in zip(group.layers, group.shapes, strict=False) if each[0] in own
            ]
            layers = tuple(layer - own.start for layer, _ in pairs)
            groups.append(CacheGroup(group.spec, layers, tuple(shape for _, shape in pairs)))
        return CacheLayout(tuple(groups), self.block_size, _cost(groups) * self.block_size)


def max_blocks(
    groups: Sequence[CacheGroup],
    block_size: int,
    num_tokens: int,
    max_step_tokens: int,
    num_encoder_tokens: int | None = None,
) -> int:
    """The most blocks that one request of num_tokens has at once, over all groups. `num_encoder_tokens`: None: the most."""
    whole = -(-num_tokens // block_size)
    total = 0
    for group in groups:
        if isinstance(group.spec, WindowSpec):
            most_in_window = -(-(group.spec.window + max_step_tokens) // block_size) + 1
            total += min(whole, most_in_window)
        elif isinstance(group.spec, CrossAttentionSpec):
            longest = group.spec.max_encoder_len
            total += -(
                -(longest if num_encoder_tokens is None else num_encoder_tokens) // block_size
            )
        else:
            total += whole
    return total


def layout(specs: Sequence[CacheSpec], block_size: int, max_model_len: int) -> CacheLayout:
    """Group layers 0 .. len(specs) - 1. A window of at least max_model_len tokens counts as full attention.

    A model that keeps nothing of its tokens gets a group without layers: its blocks count tokens and cost no memory.
    """
    counting = CacheGroup(CacheSpec(0, 0, 0, "int8"), ())
    if not specs:
        return CacheLayout((counting,), block_size, 0)
    effective = [_effective(spec, max_model_len) for spec in specs]
    kinds: dict[tuple[int, int], list[int]] = {}  # order and length -> layers
    for layer, spec in enumerate(effective):
        kinds.setdefault(_kind(spec), []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    # Groups of tokens first: the first one says how many tokens a request has room for.
    groups = [counting] if all(isinstance(spec, CrossAttentionSpec) for spec in effective) else []
    for _, layers in sorted(kinds.items(), key=lambda kind: kind[0][0]):
        count = -(-len(layers) // size)
        share = -(-len(layers) // count)  # groups of a kind as equal as possible
        parts = [layers[first : first + share] for first in range(0, len(layers), share)]
        if len({effective[layer] for layer in layers}) > 1:  # as many of each shape in each group
            layers.sort(key=lambda layer: effective.index(effective[layer]))
            parts = [layers[first::count] for first in range(count)]
        for part in parts:
            shapes = tuple(effective[layer] for layer in part)
            groups.append(CacheGroup(shapes[0], tuple(part), shapes))
    return CacheLayout(tuple(groups), block_size, _cost(groups) * block_size)


class GroupPart(NamedTuple):
    """The layers of one shape in a group."""

    group: int
    spec: CacheSpec
    layers: list[int]


def by_shape(groups: Sequence[CacheGroup]) -> dict[tuple[int, int, int, str], list[GroupPart]]:
    """The layers that can share storage: equal head counts, sizes and element types."""
    out: dict[tuple[int, int, int, str], dict[int, GroupPart]] = {}
    for number, group in enumerate(groups):
        for layer, spec in zip(group.layers, group.shapes or repeat(group.spec), strict=False):
            key = (spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.dtype)
            parts = out.setdefault(key, {})
            parts.setdefault(number, GroupPart(number, spec, [])).layers.append(layer)
    return {key: list(parts.values()) for key, parts in out.items()}


def _cost(groups: Sequence[CacheGroup]) -> int:
    """Bytes of a token in all storage tensors."""
    return sum(
        shared[0].spec.bytes_per_token * max(len(part.layers) for part in shared)
        for shared in by_shape(groups).values()
    )


def _kind(spec: CacheSpec) -> tuple[int, int]:
    """Equal for layers that keep the same. Full attention first: these groups need a prefix without gaps."""
    if isinstance(spec, CrossAttentionSpec):
        return 2, spec.max_encoder_len
    return (1, spec.window) if isinstance(spec, WindowSpec) else (0, 0)


def _effective(spec: CacheSpec, max_model_len: int) -> CacheSpec:
    if isinstance(spec, WindowSpec) and spec.window >= max_model_len:
        return CacheSpec(spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.dtype)
    return spec
