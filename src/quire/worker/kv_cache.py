"""The KV cache as tensors: one pool of blocks, which all KV groups share.

Knows groups, shapes, bytes and backends. Does not know requests or which block belongs to which. Storage i belongs to
layer number i of *every* group, so a block id means the same bytes in all groups:

    group 0   layers 0 2 4        storage 0   layers 0 and 1
    group 1   layers 1 3 5        storage 1   layers 2 and 3 ...

Groups share storage only if their heads have equal sizes (`kvcache/layout.by_shape`). With several such
classes, a block id takes its bytes in each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.attention.base import Needs, choose_backend
from quire.attention.decode_context_parallel import DecodeContextParallelAttention, num_kept
from quire.errors import ConfigError, Unsupported
from quire.kvcache.layout import by_shape
from quire.kvcache.specs import CacheGroup
from quire.platforms.memory import lazy_zeros

if TYPE_CHECKING:
    from quire.attention.base import AttentionBackend
    from quire.config.engine import ModelSpec, Resolved
    from quire.layers.attention import Attention
    from quire.models.base import LanguageModel
    from quire.parallel.ranks import RankGroup
    from quire.platforms.base import Platform
    from quire.worker.memory_plan import MemoryPlan
    from quire.worker.row_states import RowStates


def cached_layers(models: Sequence[LanguageModel]) -> list[Attention]:
    """The attention layers of all models, in the order of the memory plan's cache specs."""
    return [layer for model in models for layer in model.attention_layers()]


def allocate_cache(
    layers: Sequence[Attention],
    groups: Sequence[CacheGroup],
    num_blocks: int,
    block_size: int,
    backends: Sequence[AttentionBackend],
    platform: Platform | None = None,
) -> list[tuple[Tensor, ...]]:
    """Allocate zeroed storage and give it to the attention layers (`spec.cache`, `kv_group`, `backend`).

    `backends`: of each layer. `groups[g].layers` index `layers`. `num_blocks` includes the null block.
    Returns the storages: for each, the flat parts (keys, values ...), of which layers get reshaped views.

    Raises:
        Unsupported: two layers with equal heads have different layouts, or blocks are not the first dimension.
    """
    device = torch.device("cpu") if platform is None else torch.device(platform.device)
    everything = []
    for parts in by_shape(groups).values():
        cache_parts = {
            index: backends[index].cache_parts(part.spec, num_blocks, block_size)
            for part in parts
            for index in part.layers
        }
        first = cache_parts[parts[0].layers[0]]
        sizes = tuple((prod(shape), dtype) for shape, dtype in first)
        if any(
            tuple((prod(shape), dtype) for shape, dtype in shapes) != sizes
            or any(shape[0] != num_blocks for shape, _ in shapes)
            for shapes in cache_parts.values()
        ):
            raise Unsupported(
                f"a KV cache whose KV groups cannot share blocks ({list(cache_parts.values())})",
                "choose another attention_backend",
            )
        count = max(len(part.layers) for part in parts)
        storages = [
            tuple(lazy_zeros(size, dtype, device) for size, dtype in sizes) for _ in range(count)
        ]
        for part in parts:
            for storage, index in zip(storages, part.layers, strict=False):
                cache = tuple(
                    flat.view(each.shape)
                    for flat, each in zip(storage, cache_parts[index], strict=True)
                )
                layers[index].bind(backends[index], cache, part.group)
        everything += storages
    return everything


def allocate_kv_cache(
    models: Sequence[LanguageModel],
    resolved: Resolved,
    platform: Any,
    specs: Sequence[ModelSpec],
    plan: MemoryPlan,
    states: RowStates,
    keepers: RankGroup | None = None,
) -> list[tuple[Tensor, ...]]:
    """Choose a backend for each model, and give each layer its part of the cache, or of the states.

    `specs`: of the models. `keepers`: the ranks that keep a part of the blocks each; None: this rank keeps all. Returns the
    storages of the cache.
    """
    states.allocate([layer for model in models for layer in model.state_layers()], platform.device)
    layers = cached_layers(models)
    backends: list[AttentionBackend] = []
    for spec, model in zip(specs, models, strict=True):
        if own := model.attention_layers():
            backends += [choose_attention(resolved, platform, spec.dtype, own)] * len(own)
    if not layers:
        return []
    groups, num_blocks = plan.layout.groups, plan.num_blocks + 1
    if keepers is not None:
        backends = [
            DecodeContextParallelAttention(one, keepers, resolved.block_size) for one in backends
        ]
        num_blocks = num_kept(num_blocks, keepers.size)
    return allocate_cache(layers, groups, num_blocks, resolved.block_size, backends, platform)


def choose_attention(
    resolved: Resolved, platform: Any, dtype: str, layers: Sequence[Attention]
) -> AttentionBackend:
    """The backend of a model with these layers, which computes in `dtype`.

    Raises:
        ConfigError: none supports every layer; chunks of prompts are on and tokens attend to later ones; ranks share the
            context of a model with cross attention.
    """
    needs = Needs.of(
        (layer.spec for layer in layers),
        device=resolved.device,
        dtype=dtype,
        kv_dtype=resolved.kv_dtype_for(dtype),
        block_size=resolved.block_size,
    )
    parallel = resolved.config.parallel
    splits_context = max(
        parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    )
    if splits_context > 1 and any(layer.spec.max_encoder_len for layer in layers):
        raise ConfigError(
            "ranks cannot share the context of a model with cross attention: set"
            " prefill_context_parallel_size and decode_context_parallel_size to 1"
        )
    if needs.non_causal and resolved.chunked_prefill:
        raise ConfigError(
            "tokens of this model attend to later tokens, so a prompt must be computed in one step:"
            " set enable_chunked_prefill=False, and max_num_batched_tokens to at least max_model_len"
        )
    return choose_backend(resolved.attention_backend, platform.attention, needs)[1]
