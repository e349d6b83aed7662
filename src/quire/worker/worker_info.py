"""WorkerInfo: what a worker reports to its engine when it is built.

Knows the cache specs of layers as plain fields. Does not load torch.
"""

from __future__ import annotations

import msgspec

from quire.kvcache.specs import CacheSpec, CrossAttentionSpec, WindowSpec


class WorkerInfo(msgspec.Struct):
    """What a worker reports when it is built: all that the engine must know about it."""

    # for each layer the fields of its spec; window 0: no window; max_encoder_len 0: no cross attention
    specs: list[tuple[int, int, int, str, int, int]]
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    model_impl: str
    prefix_caching: bool
    state_bytes: int  # recurrent states of all rows, and their checkpoints
    num_checkpoints: int
    stages: list[tuple[str, float]]
    batch_invariant: bool = False  # a request's bits do not depend on batches and chunks

    def layer_specs(self) -> list[CacheSpec]:
        return [_spec_of(*spec) for spec in self.specs]


def fields_of(spec: CacheSpec) -> tuple[int, int, int, str, int, int]:
    window = spec.window if isinstance(spec, WindowSpec) else 0
    encoder = spec.max_encoder_len if isinstance(spec, CrossAttentionSpec) else 0
    return spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.dtype, window, encoder


def _spec_of(
    kv_heads: int, head_dim: int, v_head_dim: int, dtype: str, window: int, encoder: int
) -> CacheSpec:
    """The inverse of `fields_of`."""
    sizes = (kv_heads, head_dim, v_head_dim, dtype)
    if encoder:
        return CrossAttentionSpec(*sizes, max_encoder_len=encoder)
    return WindowSpec(*sizes, window=window) if window else CacheSpec(*sizes)
