"""The KV cache as tensors: one pool of blocks, shared by all groups of layers.

Knows groups, shapes and bytes. Does not know requests or which block is whose. Storage i belongs to layer
number i of *every* group, so a block id names the same bytes in whichever group it is used:

    group 0   layers 0 2 4        storage 0   layers 0 and 1
    group 1   layers 1 3 5        storage 1   layers 2 and 3 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.errors import Unsupported
from quire.kvcache.specs import CacheGroup

if TYPE_CHECKING:
    from torch import nn

    from quire.attention.base import AttentionBackend
    from quire.platforms.base import Platform


def allocate_cache(
    model: nn.Module,
    groups: Sequence[CacheGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    backend: AttentionBackend,
    platform: Platform | None = None,
) -> list[tuple[Tensor, ...]]:
    """Allocate zeroed storage and hand it to the model's attention layers (`cache`, `group`, `backend`).

    `groups[g].layers` index `model.attention_layers()`. `num_blocks` counts the null block.
    Returns the storages: for each, the flat parts (keys, values) that layers see under their own shapes.

    Raises:
        Unsupported: the groups' layers want blocks of different bytes.
    """
    device = torch.device("cpu") if platform is None else torch.device(platform.device)
    layers = model.attention_layers()
    shapes = [backend.cache_shape(group.spec, num_blocks, block_size) for group in groups]
    sizes = [tuple(prod(shape) for shape in parts) for parts in shapes]
    if len(set(sizes)) > 1 or any(shape[0] != num_blocks for parts in shapes for shape in parts):
        raise Unsupported(
            f"a cache whose groups of layers have blocks of different layout ({shapes})",
            "use a model whose layers have key/value heads of one size",
        )
    count = max((len(group.layers) for group in groups), default=0)
    storages = [
        tuple(torch.zeros(size, dtype=dtype, device=device) for size in sizes[0])
        for _ in range(count)
    ]
    for number, (group, parts) in enumerate(zip(groups, shapes, strict=True)):
        for storage, index in zip(storages, group.layers, strict=False):
            layer = layers[index]
            layer.cache = tuple(
                flat.view(shape) for flat, shape in zip(storage, parts, strict=True)
            )
            layer.group, layer.backend = number, backend
    return storages
