"""Attention by the CPU kernels: one call for any mix of prompts, chunks and single tokens.

Knows addresses and strides. `ops/cpu/kernels/attention.cpp` explains the computation, and why its bits depend neither
on the batch nor on chunks.

Shape suffixes: T tokens of this step, H query heads, K key/value heads, D head size (of values: E).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, Capabilities
from quire.attention.kv_quantization import Part
from quire.forward_context import ForwardBatch
from quire.kvcache.specs import CacheSpec
from quire.ops.cpu.bindings import best

STEP = 32  # head sizes are multiples of it
TOKENS = 16  # block sizes are multiples of it
KINDS = (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # kernels/kv_codec.h


@dataclass(slots=True)
class CpuStepMetadata:
    """Step metadata that the layers of a KV group share; it keeps the tensors alive for kernels that use addresses."""

    table_BN: Tensor  # int32
    starts_B1: Tensor  # int32
    lengths_B: Tensor  # int32
    slots_T: Tensor  # int64
    rows: int


class CpuAttention(AttentionBackend):
    """Cache layout: `kv_quantization.parts`."""

    can = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"}),
        head_dims=range(STEP, 577, STEP),
        block_sizes=range(TOKENS, 4097, TOKENS),
        differing_values=True,
        windows=True,
        softcap=True,
        sinks=True,
        latent=True,
    )

    def __init__(self) -> None:
        found = best()
        if found is None:
            raise ImportError("the native kernels are not loaded")
        self.kernels = found

    def cache_parts(self, spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[Part, ...]:
        """Raises ValueError: the kernels do not take heads or blocks of this size."""
        if spec.head_dim % STEP or block_size % TOKENS:
            raise ValueError(
                f"the CPU kernels take heads of a multiple of {STEP} features and blocks of a multiple of {TOKENS}"
                f" tokens, not {spec.head_dim} and {block_size}: use the reference backend"
            )
        return super().cache_parts(spec, num_blocks, block_size)

    def plan(self, batch: ForwardBatch, kv_group: int) -> CpuStepMetadata:
        return CpuStepMetadata(
            _as(torch.int32, batch.block_tables[kv_group]),
            _as(torch.int32, batch.query_start_B1),
            _as(torch.int32, batch.lengths_B),
            _as(torch.int64, batch.slots[kv_group]),
            batch.num_rows,
        )

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKE: Tensor | None,
        meta: CpuStepMetadata,
    ) -> Tensor:
        addresses, block_size = cache_addresses(spec.cache), spec.cache[0].shape[2]
        keys, values, key_scales, value_scales, kind = addresses
        if k_TKD is not None:
            self._write(k_TKD, (keys, key_scales), meta.slots_T, block_size, kind, True)
        if v_TKE is not None and not spec.latent:
            self._write(v_TKE, (values, value_scales), meta.slots_T, block_size, kind, False)
        q_THD = _side_by_side(q_THD)
        sinks_H = None if spec.sinks is None else spec.sinks.float().contiguous()
        o_THE = torch.empty((len(q_THD), spec.num_heads, spec.v_head_dim), dtype=torch.bfloat16)
        self.kernels.attention(
            q_THD.data_ptr(), q_THD.stride(0), o_THE.data_ptr(), *addresses, meta.table_BN.data_ptr(), meta.table_BN.shape[1], meta.starts_B1.data_ptr(), meta.lengths_B.data_ptr(),
            None if sinks_H is None else sinks_H.data_ptr(), meta.rows, spec.num_heads, spec.num_kv_heads,
            spec.head_dim, spec.v_head_dim, block_size, spec.window or 0, spec.scale, spec.softcap or 0.0,
        )  # fmt: skip
        return o_THE

    def _write(
        self,
        new_TKD: Tensor,
        into: tuple[int, int | None],
        slots_T: Tensor,
        block_size: int,
        kind: int,
        key: bool,
    ) -> None:
        new_TKD = _side_by_side(new_TKD)
        tokens, heads, size = new_TKD.shape
        self.kernels.write_cache(
            new_TKD.data_ptr(), new_TKD.stride(0), *into, slots_T.data_ptr(), tokens, heads, size, block_size, kind, key,
        )  # fmt: skip


def cache_addresses(cache: tuple[Tensor, ...]) -> tuple[int, int, int | None, int | None, int]:
    """Addresses of keys, values and the scales of both; and the kernels' number for the cache's dtype."""
    keys, values, *scales = (part.data_ptr() for part in cache)
    key_scales, value_scales = scales or (None, None)
    return keys, values, key_scales, value_scales, KINDS.index(cache[0].dtype)


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()


def _side_by_side(x_THD: Tensor) -> Tensor:
    """The tensor itself if each token's heads are contiguous, else a copy."""
    fits = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if fits else x_THD.contiguous()
